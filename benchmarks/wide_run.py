"""right? faster? : dk, dv of the window (with the local blocks within) and of the compressed branch"""
import sys; sys.path.insert(0,'.'); sys.path.insert(0,'.dev/dkv')
import torch, triton
from benchmarks import common
from native_sparse_attention.kernels import interval_backward as ib, launch, device
from native_sparse_attention.kernels.launch import Place, Cotangent
import wide_backward as wb
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon import language as gl
dev=torch.device('cuda')
t_=lambda f: round(common.time_call(f,0.05,dev)['p50_ms']*1e3)
def box(t, shape): return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, gl.NVMMASharedLayout(128, 16, rank=4))
def gluon(q,k,v,place,scale,cot,inner=None,stages=3,regs=240,splits=None):
    B,T,H,D=q.shape; N,K=k.shape[1:3]; G=H//K; TOK=64//G
    within,icot=inner or (None,cot)
    seeing=T if place.wide else min(T,place.reach+128)
    blocks=triton.cdiv(N,128)
    if splits is None: splits=launch.query_splits(blocks*B*K, triton.cdiv(seeing,TOK), place.wide)
    dk=torch.empty(splits,B,N,K,D,device=q.device); dv=torch.empty_like(dk)
    wb.dkv_kernel[(blocks,B*K,splits)](box(q,[1,TOK,G,D]),box(k,[1,64,1,D]),box(v,[1,64,1,D]),box(cot.d_out,[1,TOK,G,D]),
        cot.lse,cot.delta,icot.lse,icot.delta,dk,dv,place.start,T,N,scale,place.floor,place.reach,place.stride,
        within.floor if within else 0,within.reach if within else 0,within.stride if within else 1,
        G=G,K=K,STAGES=stages,KIND=place.kind,INNER=within is not None,GATED=cot.gated,REGISTERS=regs,num_warps=4)
    return (dk[0],dv[0]) if splits==1 else (dk.sum(0),dv.sum(0))
def case(T,H,K,what,check):
    g=torch.Generator(dev).manual_seed(0)
    r=lambda *s,dt=torch.bfloat16: torch.randn(*s,generator=g,device=dev,dtype=dt)
    q=r(1,T,H,128); do=r(1,T,H,128)
    N=T if what=='window' else T//16
    k,v=r(1,N,K,128),r(1,N,K,128)
    lse=r(1,T,H,dt=torch.float32)+8; delta=r(1,T,H,dt=torch.float32)*.1
    cot=Cotangent(do,lse,delta,True); other=Cotangent(r(1,T,H,128),lse+1,-delta,True); other.d_out.copy_(do)
    if what=='window':
        place=Place(device.CAUSAL_WINDOW.value,511); inner=(Place(device.LOCAL_BLOCKS.value,64,64,floor=64),other)
    else: place,inner=Place(device.BEHIND.value,stride=16,unit=16),None
    a=(q,k,v,place,128**-.5,cot,inner)
    ref=ib.backward_kv(*a)
    out=gluon(*a)
    err=['%.1e'%((x-y).norm()/y.norm()).item() for x,y in zip(out,ref)]
    same=all(torch.equal(x,y) for x,y in zip(out,gluon(*a)))
    print(what,T,H,K,'err',err,'equal',same,flush=True)
    if check: return
    print('   triton',t_(lambda: ib.backward_kv(*a)),flush=True)
    for st,rg in ((3,240),(2,240),(4,240),(3,232)):
        try: print('   gluon stages',st,'regs',rg,t_(lambda: gluon(*a,stages=st,regs=rg)),flush=True)
        except Exception as e: print('   ',st,rg,str(e)[:100])
    if what=='window':
        b=a[:6]; print('   no inner: triton',t_(lambda: ib.backward_kv(*b)),'gluon',t_(lambda: gluon(*b)),flush=True)
    for sp in (1,2,4,8,16,32): print('   splits',sp,t_(lambda: gluon(*a,splits=sp)),flush=True)
for H,K,T in ((64,4,1000),(8,8,333),(12,3,515)):
    for what in ('window','compressed'):
        if T%16 and what=='compressed': T=T//16*16
        case(T,H,K,what,True)
for T in eval(sys.argv[1]):
    for what in ('window','compressed'): case(T,64,4,what,False)
