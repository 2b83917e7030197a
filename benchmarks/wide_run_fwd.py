"""right? faster? : forward of the window (with the local and initial blocks) and of the compressed branch"""
import sys; sys.path.insert(0,'.'); sys.path.insert(0,'.dev/dkv')
import torch, triton
from benchmarks import common
from native_sparse_attention.kernels import interval, launch, device
from native_sparse_attention.kernels.norms import key_norms
from native_sparse_attention.kernels.launch import Place, LOG2_E
import wide_forward as wf
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon import language as gl
dev=torch.device('cuda'); SMS=torch.cuda.get_device_properties(0).multi_processor_count
t_=lambda f: round(common.time_call(f,0.05,dev)['p50_ms']*1e3)
def box(t, shape): return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, gl.NVMMASharedLayout(128, 16, rank=4))
def gluon(q,k,v,place,scale,inner,norms,stages=None,regs=240):
    B,T,H,D=q.shape; N,K=k.shape[1:3]; G=H//K; TOK=64//G
    out=torch.empty_like(q); lse=torch.empty(B,T,H,device=q.device)
    iout,ilse=(torch.empty_like(q),torch.empty_like(lse)) if inner else (out,lse)
    tiles,lines=triton.cdiv(T,2*TOK),B*K
    o=lambda t: box(t,[1,TOK,G,D])
    wf.forward_kernel[(min(SMS,tiles*lines),)](o(q),box(k,[1,64,1,D]),box(v,[1,64,1,D]),o(out),lse,o(iout),ilse,norms,place.start,T,N,K,scale*LOG2_E,
        place.floor,place.reach,place.stride,inner.floor if inner else 0,inner.reach if inner else 0,inner.stride if inner else 1,tiles,lines,
        G=G,STAGES=stages or 4,KIND=place.kind,INNER=inner is not None,BOUNDED=norms is not None,REGISTERS=regs,num_warps=4)
    return (out,lse,iout,ilse) if inner else (out,lse)
def case(T,H,K,what,check,start=0,size=1.):
    g=torch.Generator(dev).manual_seed(0)
    r=lambda *s,dt=torch.bfloat16: torch.randn(*s,generator=g,device=dev,dtype=dt)
    q=r(1,T,H,128)*size; S=T+start
    N=S if what=='window' else S//16
    k,v=r(1,N,K,128),r(1,N,K,128); norms=key_norms(q,k)
    if what=='window':
        place=Place(device.CAUSAL_WINDOW.value,511,start=start); inner=Place(device.LOCAL_BLOCKS.value,64,64,floor=64,start=start,causal_prefix=True); prefix=(k[:,:64],v[:,:64])
    else: place,inner,prefix=Place(device.BEHIND.value,stride=16,unit=16,start=start),None,None
    ref=lambda: interval.forward(q,k,v,place,128**-.5,inner=inner,norms=norms)
    a=(q,k,v,place,128**-.5,inner)
    x=ref()
    for n in (norms,None):
        y=gluon(*a,n); err=[]
        for i,j in zip(y,x):
            i,j=i.float(),j.float(); m=j.isfinite(); err.append('%.1e%s'%(((i-j)[m].norm()/j[m].norm()).item(),'' if (i.isfinite()==m).all() else ' INF'))
        print(what,T,H,K,start,size,'bound' if n is not None else 'max','err',err,'equal',all(torch.equal(i,j) for i,j in zip(y,gluon(*a,n))),flush=True)
    if check: return
    print('   triton',t_(ref),flush=True)
    for st in ((4,3) if inner else (4,5,3)):
        try: print('   gluon stages',st,t_(lambda: gluon(*a,norms,stages=st)),'max',t_(lambda: gluon(*a,None,stages=st)),flush=True)
        except Exception as e: print('   ',st,str(e)[:100])
for T,H,K,start,size in ((1000,64,4,0,1.),(333,8,8,0,1.),(515,12,3,37,4.)):
    for what in ('window','compressed'): case(T,H,K,what,True,start,size)
for T in eval(sys.argv[1]):
    for what in ('window','compressed'): case(T,64,4,what,False)
