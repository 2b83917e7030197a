"""right? faster? : dq of the window (with the local and initial blocks) and of the compressed branch"""
import sys; sys.path.insert(0,'.'); sys.path.insert(0,'.dev/dkv')
import torch, triton
from benchmarks import common
from native_sparse_attention.kernels import interval_backward as ib, launch, device
from native_sparse_attention.kernels.launch import Place, Cotangent, Sum
import wide_dq as wq
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon import language as gl
dev=torch.device('cuda'); SMS=torch.cuda.get_device_properties(0).multi_processor_count
t_=lambda f: round(common.time_call(f,0.05,dev)['p50_ms']*1e3)
def box(t, shape): return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, gl.NVMMASharedLayout(128, 16, rank=4))
def gluon(q,k,v,place,scale,cot,dq,inner=None,stages=3,regs=240):
    B,T,H,D=q.shape; N,K=k.shape[1:3]; G=H//K; TOK=64//G
    within,icot=inner or (None,cot); tiles,lines=triton.cdiv(T,2*TOK),B*K
    o=lambda t: box(t,[1,TOK,G,D]); into=dq.arguments()
    wq.dq_kernel[(min(SMS,tiles*lines),)](o(q),box(k,[1,64,1,D]),box(v,[1,64,1,D]),o(cot.d_out),o(into['dq']),cot.lse,cot.delta,icot.lse,icot.delta,
        place.start,T,N,K,scale,place.floor,place.reach,place.stride,within.floor if within else 0,within.reach if within else 0,within.stride if within else 1,
        tiles,lines,G=G,STAGES=stages,KIND=place.kind,INNER=within is not None,GATED=cot.gated,ADD=into['ADD'],REGISTERS=regs,num_warps=4)
def case(T,H,K,what,check,start=0):
    g=torch.Generator(dev).manual_seed(0)
    r=lambda *s,dt=torch.bfloat16: torch.randn(*s,generator=g,device=dev,dtype=dt)
    q=r(1,T,H,128); do=r(1,T,H,128); S=T+start; N=S if what=='window' else S//16
    k,v=r(1,N,K,128),r(1,N,K,128)
    lse=r(1,T,H,dt=torch.float32)+8; delta=r(1,T,H,dt=torch.float32)*.1
    cot=Cotangent(do,lse,delta,True); other=Cotangent(do,lse+1,-delta,True)
    if what=='window':
        place=Place(device.CAUSAL_WINDOW.value,511,start=start); inner=(Place(device.LOCAL_BLOCKS.value,64,64,floor=64,start=start,causal_prefix=True),other)
    else: place,inner=Place(device.BEHIND.value,stride=16,unit=16,start=start),None
    before=r(1,T,H,128)*.01
    def run(f,add):
        s=Sum(q)
        if add: s.value.copy_(before); s.begun=True
        f(q,k,v,place,128**-.5,cot,s,inner=inner); return s.value
    for add in (False,True):
        x,y,z=run(ib.backward_q,add),run(gluon,add),run(gluon,add)
        print(what,T,H,K,start,'add',add,'err %.1e'%((x.float()-y.float()).norm()/x.float().norm()).item(),'equal',torch.equal(y,z),flush=True)
    if check: return
    s=Sum(q); s.begun=True
    print('   triton',t_(lambda: ib.backward_q(q,k,v,place,128**-.5,cot,s,inner=inner)),flush=True)
    for st in (3,2): print('   gluon stages',st,t_(lambda: gluon(q,k,v,place,128**-.5,cot,s,inner=inner,stages=st)),flush=True)
for T,H,K,start in ((1000,64,4,0),(333,8,8,0),(515,12,3,37)):
    for what in ('window','compressed'): case(T,H,K,what,True,start)
for T in eval(sys.argv[1]):
    for what in ('window','compressed'): case(T,64,4,what,False)
