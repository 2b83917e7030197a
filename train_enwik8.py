"""Train a byte-level language model with Native Sparse Attention, and watch it learn.

    python train_enwik8.py                                     a run with this device's preset
    python train_enwik8.py --resume runs/NAME                  go on exactly where a run stopped
    python train_enwik8.py --sample runs/NAME --prompt TEXT    stream text from a trained run
    torchrun --nproc-per-node 4 train_enwik8.py --cp 2 --tp 2  in several processes

Everything that decides a run is a setting of the table below, written to `runs/NAME/config.json`.
The bytes of a step are drawn from (seed, step) alone, so a run that was killed and resumed equals
one that was not. `data/README.md` says where the bytes come from, `training/` has what surrounds
the loop: options, data, the files of a run, the plot, and `python -m training.view RUN`.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any

from training.options import (
    Table,
    catch_signals,
    count,
    exit_status,
    layer_indices,
    parse,
    real,
    seed,
    size,
    threads,
    tokens,
    whole,
)

__all__ = ["main"]

# name: (type or choices, preset on CPU, preset on CUDA, meaning)
SETTINGS: Table = {
    "data": (str, "auto", "auto", "auto, enwik8, stdlib or the path of any file of bytes"),
    "pack": (str, "", "", "starts a document (<page> in enwik8); attention never crosses it"),
    "attention": (
        ("auto", "sparse", "one-softmax", "dense"),
        "auto",
        "auto",
        "three branches, one softmax over selected blocks, full (auto, and sizes: by --seq-len)",
    ),
    "dim": (count, 128, 512, "model width"),
    "depth": (count, 2, 6, "layers"),
    "heads": (count, 4, 8, "query heads"),
    "kv_heads": (count, 2, 4, "key and value heads"),
    "dim_head": (count, 32, 64, "width of a head"),
    "ff_expansion_factor": (real, 4.0, 4.0, "feed-forward width over model width"),
    "sliding_window_size": (count, 32, 64, "w, tokens back in the window branch"),
    "compress_block_size": (count, 8, 16, "l, tokens in a compressed block"),
    "compress_block_sliding_stride": (count, 4, 8, "d, tokens between compressed blocks"),
    "selection_block_size": (count, 8, 16, "s, tokens in a selected block"),
    "num_selected_blocks": (whole, 4, 4, "n, blocks selected per query"),
    "num_initial_blocks": (whole, 0, 0, "first blocks that every query reads"),
    "num_local_blocks": (count, 1, 1, "last blocks that every query reads, its own included"),
    "importance": (
        ("logits", "max", "head_max", "probs"),
        "logits",
        "logits",
        "how blocks are ranked",
    ),
    "ranking_bits": (count, 16, 16, "of the numbers that rank, 8 or 16"),
    "selection_stride": (count, 1, 1, "R, neighbouring tokens that share a selection"),
    "local_layers": (
        layer_indices,
        "auto",
        "auto",
        "layers that rank nothing, such as 0,2 (auto: a third of one softmax, from 16384 tokens)",
    ),
    "backend": (("auto", "eager", "flex", "triton"), "auto", "auto", "who computes attention"),
    "seq_len": (tokens, 256, 512, "tokens in a training sequence"),
    "batch_size": (count, 8, 32, "sequences in a forward pass"),
    "accumulate": (count, 1, 1, "forward passes in a step"),
    "steps": (count, 600, 5000, "optimizer steps in all"),
    "lr": (real, 2e-3, 1e-3, "peak learning rate"),
    "warmup": (whole, 50, 200, "steps of linear warm-up, before a cosine down to a tenth"),
    "weight_decay": (real, 0.1, 0.1, "of matrices, not of vectors"),
    "clip": (real, 1.0, 1.0, "largest gradient norm"),
    "seed": (seed, 0, 0, "of weights, data order and sampled text"),
    "precision": (("fp32", "bf16"), "fp32", "bf16", "of the forward pass; weights are fp32"),
    "compile": (("auto", "on", "off"), "auto", "auto", "torch.compile; auto: on CUDA"),
    "activation_checkpointing": (("on", "off"), "off", "off", "less memory, more time"),
    "log_every": (count, 1, 10, "steps between lines of metrics.jsonl"),
    "eval_every": (count, 50, 250, "steps between validations"),
    "eval_bytes": (size, 2**15, 2**20, "validation bytes read each time"),
    "test_bytes": (size, 2**16, 5 * 10**6, "test bytes read at the end"),
    "sample_every": (whole, 200, 1000, "steps between sampled texts; 0: none"),
    "sample_length": (count, 256, 512, "bytes of a sampled text"),
    "save_every": (count, 100, 500, "steps between checkpoints"),
    "keep": (count, 2, 2, "checkpoints kept, besides the best"),
    "threads": (threads, None, None, "CPU threads; may change last bits (default: half the cores)"),
    "device": (str, None, None, "cpu, cuda, cuda:1 ... (default: cuda where there is one)"),
}

# tokens of a sequence, as README.md says of short ones
DENSE_IS_FASTER = 4096
# fits into 80 columns with the loss and the speed; the bar takes what is left
BAR = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def command_line(argv: list[str] | None = None) -> Namespace:
    return parse(argv, SETTINGS, (__doc__ or "").partition("\n")[0])


if __name__ == "__main__" and {"-h", "--help"} & {*sys.argv}:
    command_line()  # which ends here, before imports of seconds

try:
    import torch
    from tqdm import tqdm

    from native_sparse_attention import Transformer
    from training import ranks
    from training.batches import batches
    from training.data import check_data, load_data, split
    from training.errors import UserError
    from training.evaluate import evaluate
    from training.forward import compiled, loss_of
    from training.plot import draw, tensorboard
    from training.runs import (
        METRICS,
        append,
        begun_run,
        check_name,
        model_arguments,
        open_folder,
        resume,
        save_best,
        save_checkpoint,
        write,
    )
    from training.sample import generate, sample
    from training.settings import new_settings, resume_settings
    from training.view import write_view
except ModuleNotFoundError as error:
    needed = str(error.name).partition(".")[0]
    print(f"train_enwik8.py needs {needed}: pip install -e '.[train]'", file=sys.stderr)
    sys.exit(2)


def build(cfg: Namespace) -> Transformer:
    """The model of the settings; `training.runs.load_model` takes the same arguments."""
    torch.manual_seed(cfg.seed)
    try:
        model = Transformer(**model_arguments(vars(cfg)))
    except ValueError as error:
        raise UserError(str(error)) from None
    return model.to(cfg.device)


def build_optimizer(model: torch.nn.Module, cfg: Namespace) -> torch.optim.AdamW:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = torch.device(cfg.device).type in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(cfg: Namespace, step: int) -> float:
    if step < cfg.warmup:
        return cfg.lr * step / cfg.warmup
    done = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    return cfg.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(given: Namespace, held: ExitStack, progress: dict[str, int]) -> int:
    """A new run, or the rest of one; `held` keeps its lock until training ends. `progress` has the
    step that it is at."""
    # settings
    config: dict[str, Any] = {}
    if "resume" not in given and (begun := ranks.from_first(lambda: begun_run(given.out_dir))):
        settings = SETTINGS.keys() - {"device"}  # the run has them
        options = {name: value for name, value in vars(given).items() if name not in settings}
        given = Namespace(**options, resume=begun)
    if "resume" in given:
        cfg, config = resume_settings(given, SETTINGS, held if ranks.is_first() else None)
    else:
        if given.name is not None:
            check_name(given.out_dir, given.name)
        cfg = new_settings(given, SETTINGS)
    ranks.check_same(given, cfg)
    writer, views = tensorboard() if "tensorboard" in given else None, "view" in given
    if views and cfg.attention == "dense":
        raise UserError("--view goes with sparse attention: dense attention reads all tokens")
    torch.set_num_threads(cfg.threads)
    torch.set_float32_matmul_precision("high")

    # data
    cfg.data, corpus = ranks.in_turn(lambda: load_data(cfg.data))
    train_data, valid_data, test_data = split(corpus, cfg.seq_len)
    about = check_data(cfg, corpus, config, getattr(given, "resume", None))
    ranks.check_same(given, Namespace(data=about))

    # model
    model = build(cfg)
    if ranks.is_parallel():
        forward = ranks.parallel(model, given, cfg)
        optimizer = build_optimizer(model, cfg)
    else:
        optimizer = build_optimizer(model, cfg)
        forward = compiled(model, cfg)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {cfg.attention} attention on {cfg.device}")
    if cfg.attention != "dense" and cfg.seq_len <= DENSE_IS_FASTER:
        print(f"{cfg.seq_len} tokens a sequence: dense attention is faster up to {DENSE_IS_FASTER}")
    print(f"{cfg.data}: {len(train_data):,} bytes to train, {len(valid_data):,} to validate")

    # where to begin: the newest whole checkpoint, or step 0 with a first validation
    signals = catch_signals()
    state = resume(given.resume, config, model, optimizer) if "resume" in given else None
    if from_scratch := state is None:
        valid = evaluate(forward, valid_data, cfg, cfg.eval_bytes)
        record: dict[str, Any] = {"step": 0, "val_bpb": valid}
        best = valid if math.isfinite(valid) else math.inf
        state = 0, best, [record], [json.dumps(record).encode() + b"\n"]
    start, best, records, lines = state
    if start >= cfg.steps:
        print(f"{given.resume} is finished at step {start}; a larger --steps goes on")
        return 0
    # a run keeps the names that it began with, since its checkpoints know it by its settings
    names = config.get("settings", vars(cfg)).keys()
    config = {"data": about, "parameters": parameters}
    config["settings"] = {name: value for name, value in vars(cfg).items() if name in names}
    run = Path()  # only the first process writes
    ranks.wait()
    if ranks.is_first():
        run, config = open_folder(given, f"{Path(cfg.data).stem}-{cfg.attention}", config, held)
        write(run / METRICS, b"".join(lines))
    if from_scratch:
        save_checkpoint(run, model, optimizer, 0, best, cfg.keep, config)
        if views:
            write_view(run, model, cfg, valid_data, 0)
    board = writer(str(run), purge_step=start + 1) if writer and ranks.is_first() else None
    print(f"{run}: step {start} of {cfg.steps}, validation {best:.3f} bits per byte at best")

    # the loop
    look: dict[str, Any] = {"total": cfg.steps, "initial": start, "bar_format": BAR}
    look |= dict(mininterval=0.1 if sys.stderr.isatty() else 10.0, disable=not ranks.is_first())
    with tqdm(dynamic_ncols=True, **look) as bar:
        clock, tokens, valid = time.monotonic(), 0, best
        for step in range(start + 1, cfg.steps + 1):
            progress["step"], last = step, step == cfg.steps
            every = cfg.log_every, cfg.eval_every, cfg.sample_every, cfg.save_every
            log_due, eval_due, sample_due, save_due = (e and (last or step % e == 0) for e in every)
            sample_due = sample_due and not ranks.is_parallel()

            # forward and backward, clip, step
            lr = learning_rate(cfg, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = torch.zeros((), device=cfg.device)
            for batch in batches(train_data, cfg, step):
                share = loss_of(forward, batch, cfg) / cfg.accumulate
                share.backward()
                loss += share.detach()
            norm = ranks.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip))
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            tokens += cfg.accumulate * cfg.batch_size * cfg.seq_len

            # log, evaluate, sample, save
            stopping = ranks.agree(bool(signals), cfg.device)
            pause = eval_due or sample_due or save_due or stopping
            if log_due or pause:
                loss = ranks.mean(loss)
            if (log_due or pause) and not math.isfinite(loss.item() + norm.item()):
                raise UserError(f"loss is {loss.item()} at step {step}: try a lower --lr")
            if log_due or eval_due:
                speed = tokens / (time.monotonic() - clock)
                record = {"step": step, "loss": loss.item(), "bpb": loss.item() / math.log(2)}
                record |= {"lr": lr, "grad_norm": norm.item(), "tokens_per_s": round(speed)}
                clock, tokens = time.monotonic(), 0
                if eval_due:
                    record["val_bpb"] = valid = evaluate(forward, valid_data, cfg, cfg.eval_bytes)
                    if valid < best:
                        best = valid
                        save_best(run, model, step, config)
                if last:
                    record["test_bpb"] = evaluate(forward, test_data, cfg, cfg.test_bytes)
                records.append(record)
                if ranks.is_first():
                    append(run / METRICS, json.dumps(record))
                shown = f"loss {record['bpb']:.3f} bits/byte, val {valid:.3f}, "
                shown += f"{speed:,.0f} tokens/s"
                bar.set_postfix_str(shown, refresh=False)
                if board:
                    for name, value in record.items():
                        board.add_scalar(name, value, step)
            if eval_due and ranks.is_first():
                draw(run, records)
            if sample_due and not stopping:
                prompt = valid_data[:64].tobytes()
                text = "".join(generate(model, cfg, prompt, cfg.sample_length))
                bar.write(f"--- step {step}\n{text}\n---")
            if save_due or stopping:
                save_checkpoint(run, model, optimizer, step, best, cfg.keep, config)
            if views and (save_due or stopping):
                write_view(run, model, cfg, valid_data, step)
            if pause:
                clock, tokens = time.monotonic(), 0
            if stopping:
                break
    if board:
        board.close()
    if not last:
        print(
            f"stopped at step {step}; go on with: python train_enwik8.py --resume {quote(str(run))}"
        )
        return 128 + (signals or [signal.SIGTERM])[0]
    test = record["test_bpb"]
    print(f"{run}: bits per byte: validation {valid:.3f} (best {best:.3f}), test {test:.3f}")
    print(f"sample it with: python train_enwik8.py --sample {quote(str(run))} --prompt TEXT")
    return 0


def main(argv: list[str] | None = None) -> int:
    def command() -> int:
        given = command_line(argv)
        ranks.start(given)
        if "sample" in given:
            return sample(given, SETTINGS, build)
        progress: dict[str, int] = {}
        with ExitStack() as held:
            held.callback(ranks.stop)
            held.enter_context(ranks.named_failures(progress))
            return train(given, held, progress)

    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
