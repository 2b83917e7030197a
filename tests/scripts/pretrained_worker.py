"""Part of parallel_worker.py: distributed models of transformers learn as on one process."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from native_sparse_attention.distributed import context_parallel_shard, parallelize
from native_sparse_attention.hf import SparseCache, convert, use_sparse_attention
from tests.helpers.sizes import sizes
from tests.helpers.tiny_models import SPARSE, native, tiny
from tests.scripts.parallel_worker import CP, DP, TP, batch, check_model, distribute, message

DROP_IN = SPARSE | sizes(n=2, selection_stride=4)
NSA = sizes(8, 4, 8, n=2, w=11)


def drop_in(family: str, settings: dict | None = None, **sizes):
    model = tiny(family, **sizes).double().train()
    return use_sparse_attention(model, DROP_IN | (settings or {}))


MODELS = {
    "Llama": lambda: drop_in("Llama", dict(share_ranking=[0])),
    "Llama, tied, dense at first": lambda: drop_in(
        "Llama", dict(dense_length=16), tie_word_embeddings=True
    ),
    "Qwen2 with windows": lambda: drop_in(
        "Qwen2", dict(compress_block_size=4, compress_block_sliding_stride=2)
    ),
    "Qwen3": lambda: drop_in("Qwen3"),
    "NSAForCausalLM": lambda: native(NSA).double().train(),
    "converted": lambda: convert(tiny("Llama"), DROP_IN).double().train(),
    "converted with windows": lambda: convert(tiny("Gemma2"), DROP_IN).double().train(),
}


def check_generating() -> None:
    """Tensor parallel, over caches of a rank's heads."""
    for name in ("Llama", "NSAForCausalLM", "converted"):
        models = MODELS[name]().eval(), MODELS[name]().eval()
        (ids,) = distribute(models[1], TP, rows=[batch()[0][:2, :40]])
        options = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
        texts = []
        for model in models:
            if name == "Llama":
                options["past_key_values"] = SparseCache(model.config)
            texts.append(model.generate(ids, **options))
        assert texts[0].shape == (2, 48) and torch.equal(*texts), name


def check_loading(folder: str) -> None:
    """transformers splits a drop-in model as it loads it."""
    model = drop_in("Llama")
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    options = dict(attn_implementation="nsa", dtype=torch.float64)
    split = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto"), **options
    )
    assert split.model.layers[0].self_attn.k_proj.weight.to_local().shape == (8, 32)
    with torch.no_grad():
        torch.testing.assert_close(split(batch()[0]).logits, model(batch()[0]).logits)


def check_refused() -> None:
    meshes = {name: init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("cp", "tp")}
    ids = batch()[0][:, :64]
    one_head, moe = drop_in("Llama", num_key_value_heads=1), drop_in("Mixtral")
    refused = message(lambda: parallelize(one_head, meshes["tp"]))
    assert "model must have a multiple of the 2 tensor-parallel ranks" in refused
    assert "tp_plan of MixtralForCausalLM must" in message(lambda: parallelize(moe, meshes["tp"]))
    model = parallelize(drop_in("Llama"), meshes["cp"])
    mask, positions = torch.ones_like(ids), torch.arange(64)[None]
    for words, arguments in (
        ("attention_mask must be None under context", dict(attention_mask=mask)),
        ("position_ids must be those of the shard", dict(position_ids=positions)),
        ("position_ids must be those of the shard", dict(position_ids=torch.arange(128)[None])),
        ("labels must be None without shift_labels", dict(labels=ids)),
        ("input_ids must have a multiple of 8 tokens", dict(input_ids=ids[:, :12])),
        ("input_ids must have two chunks", dict(input_ids=ids[:, :13])),
    ):
        arguments = dict(input_ids=ids) | arguments
        assert words in message(lambda a=arguments: model(**a)), words
    labels = message(lambda: model(ids, None, None, None, None, ids))
    assert "labels must be None without shift_labels" in labels
    selecting = drop_in("Llama")
    selecting.model.layers[0].self_attn.indexer = torch.nn.Identity()
    refused = message(lambda: parallelize(selecting, meshes["cp"]))
    assert "model must not select blocks by itself under context parallelism" in refused
    own = parallelize(native(NSA), meshes["cp"])
    positions = torch.cat((torch.arange(41), torch.arange(23)))[None]
    packed = message(lambda: own(ids, position_ids=positions, use_cache=False))
    assert "position_ids must be those of the shard" in packed
    with context_parallel(meshes["cp"], buffers=[ids], buffer_seq_dims=[1]):
        refused = message(lambda: drop_in("Llama")(ids), NotImplementedError)
        assert "use_sparse_attention does not support torch's context_parallel" in refused


@torch.no_grad()
def check_shards() -> None:
    """Windows that layers leave to the mask, whose experts run in float32; given positions."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    for make in (lambda: drop_in("Qwen2Moe").float(), MODELS["NSAForCausalLM"]):
        (ids, _), positions, model = batch(), torch.arange(128)[None], make()
        rows = [ids, positions, model(ids).logits]
        parallelize(model, mesh)
        ids, positions, expected = context_parallel_shard(mesh, rows, [1, 1, 1])
        torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)


def check_models(folder: str) -> None:
    check_model("Llama", MODELS["Llama"], DP, CP, activation_checkpointing=True)
    check_model("NSAForCausalLM", MODELS["NSAForCausalLM"], DP, call=dict(steps=2))
    for name, make in MODELS.items():
        # norms of Qwen3 are of heads
        check_model(name, make, *((TP,) if name in ("Llama", "Qwen3") else (TP, CP)))
    check_shards()
    check_refused()
    check_generating()
    check_loading(folder)
