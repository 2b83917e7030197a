"""right? faster? : dk, dv of the listed blocks"""
import sys; sys.path.insert(0,'.'); sys.path.insert(0,'.dev/dkv')
import torch, triton
from benchmarks import common, problem, providers, attention
from native_sparse_attention.kernels import pairs, launch
from native_sparse_attention.kernels.launch import Selection, Cotangent
import listed_backward as lb
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon import language as gl
dev=torch.device('cuda')
t_=lambda f: round(common.time_call(f,0.05,dev)['p50_ms']*1e3)
def box(t, shape): return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, gl.NVMMASharedLayout(128, 16, rank=4))
def gluon(q,k,v,sel,scale,cot,dk,dv,inverse,stages=2,regs=240):
    B,T,H,D=q.shape; S,K=k.shape[1:3]; R,n=sel.lists.shape[2:]
    C=triton.cdiv(S,sel.s); items=len(inverse.owner)
    spills=[d.new_empty(inverse.spills, sel.s, D) for d in (dk,dv)]
    G=H//R; rows=16 if G<=16 else triton.next_power_of_2(G)
    half=lambda t: box(t,[1,1,rows,64])
    lb.listed_dkv_kernel[(triton.cdiv(items,2),)](half(q),box(k,[1,64,1,D]),box(v,[1,64,1,D]),half(cot.d_out),cot.lse,cot.delta,
        dk,dv,*spills,inverse.entries,inverse.bounds,inverse.owner,inverse.item_bounds,inverse.spill_bounds,inverse.chunk,items,
        T,S,C,B*K*C,scale,K=K,R=R,n=n,G=G,D=D,STAGES=stages,GATED=cot.gated,REGISTERS=regs,num_warps=4)
    for spill,d in zip(spills,(dk,dv)):
        pairs.gather_spill_kernel[(B*K*C,1)](spill,d,inverse.spill_bounds,S,K,sel.s,C,D=D,BLOCK_D=D,BLOCK_N=sel.s)
def old(q,k,v,sel,scale,cot,dk,dv,inverse):
    B,T,H,D=q.shape; S,K=k.shape[1:3]
    args=pairs.arguments(q,k,v,sel,inverse,'backward')
    spills=[d.new_empty(inverse.spills, sel.s, D) for d in (dk,dv)]
    pairs.backward_kernel[(len(inverse.owner),1)](part=None,d_gates=None,dk=dk,dv=dv,spill_k=spills[0],spill_v=spills[1],
        spill_bounds=inverse.spill_bounds,scale=scale,BLOCK_N=sel.s,DQ=False,PIECES=1,**args,**cot.arguments())
    for spill,d in zip(spills,(dk,dv)):
        pairs.gather_spill_kernel[(B*K*args['C'],1)](spill,d,inverse.spill_bounds,S,K,sel.s,args['C'],D=D,BLOCK_D=D,BLOCK_N=sel.s)
def case(T,H,K,check):
    setting=problem.Setting(T=T,H=H,K=K); p=providers.Ours(); x=attention.prepared(p,setting,dev)
    with torch.no_grad(): lists=p.indices(x,setting)
    q,k,v=(x[i].detach() for i in 'qkv'); sel=Selection(lists.to(torch.int32).contiguous(),64,1,2,True)
    cot=Cotangent(torch.randn_like(q),torch.randn(1,T,H,device=dev)+8,torch.randn(1,T,H,device=dev)*.1,True); scale=128**-.5
    inverse,=pairs.inverted(q,k,sel,parts=False)
    fresh=lambda: [torch.ones(1,T,K,128,device=dev) for _ in range(2)]
    def run(f,**kw):
        d=fresh(); f(q,k,v,sel,scale,cot,*d,inverse,**kw); return d
    a,b,c=run(old),run(gluon),run(gluon)
    print(T,H,K,'err',['%.1e'%((x-y).norm()/(y-1).norm()).item() for x,y in zip(b,a)],'equal',all(torch.equal(x,y) for x,y in zip(b,c)),'items',len(inverse.owner),flush=True)
    if check: return
    d=fresh(); print('   triton',t_(lambda: old(q,k,v,sel,scale,cot,*d,inverse)),flush=True)
    for st,rg in ((2,240),(2,232)): print('   gluon',st,rg,t_(lambda: gluon(q,k,v,sel,scale,cot,*d,inverse,stages=st,regs=rg)),flush=True)
for T,H,K in ((2048,64,4),(1024,24,2),(1024,32,1)): case(T,H,K,True)
for T in eval(sys.argv[1]): case(T,64,4,False)
