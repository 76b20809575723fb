"""The plan of a training step beside what one allocates and sends: 1, 2 and 4 ranks on gloo.

    python benchmarks/training_memory.py [--ranks 1 2 4] [--batch 4] [--tokens 128] [--json]

Each row is a real training of a small Llama (12 blocks, hidden 512, 39.9 million parameters) in
processes of its own: two steps, of which the second is measured, when the optimizer's state is
there. Bytes are those that the C library's malloc has handed out on the first rank (`mallinfo2` of
glibc, read before and after every operator): all of torch's on the CPU, of whatever thread, and
gloo's buffers too. The plan is `plan_training` of the same options; the measured side knows nothing
of it.

parameters   what the model adds
gradients    what is free when they are dropped; of DDP its buckets
moments      what is free when the optimizer's state is dropped; main weights too
activations  what is held when the forward is done, gathered parameters too
peak         the most at any moment of the second step
sent         by the collectives that torch's dispatcher shows: (n-1)/n of the tensor, of an
             all-reduce twice that. Two programs send more than the plan, which notes it:
             ZeroRedundancyOptimizer (an all-reduce and broadcasts), and transformers' tensor
             parallelism (one all-reduce for each of q, k and v)
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("parameters", "gradients", "moments", "activations", "peak", "sent")
KEPT = PARTS[:3]
SENDS_MORE = ("DDP, ZeroRedundancyOptimizer", "tensor parallel")
"""Rows whose programs send more than the plan, which notes it."""

ROWS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, checkpointing": {"checkpointing": True},
    "one process, sdpa": {"attention": "sdpa"},
    "one process, autocast bfloat16": {"autocast": "bfloat16"},
    "one process, bfloat16 alone": {"dtype": "bfloat16", "main": False},
    "one process, bfloat16, main weights": {"dtype": "bfloat16", "main": True},
    "one process, sgd": {"optimizer": "sgd"},
    "DDP": {"axis": "dp", "zero": 0},
    "DDP, ZeroRedundancyOptimizer": {"axis": "dp", "zero": 1},
    "fully_shard": {"axis": "fsdp", "zero": 3},
    "fully_shard, checkpointing": {"axis": "fsdp", "zero": 3, "checkpointing": True},
    "fully_shard, bfloat16 alone": {"axis": "fsdp", "zero": 3, "dtype": "bfloat16", "main": False},
    "tensor parallel": {"axis": "tp"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--size", default="demo", help="of the model: test or demo")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _measure(**json.loads(args.one))
        return
    results = []
    if not args.json:
        print("MiB, plan / measured\n")
        print("| training | ranks | " + " | ".join(PARTS) + " |")
        print("|---|---|" + "---|" * len(PARTS))
    with tempfile.TemporaryDirectory() as folder:
        from divergence.experiments.tiny import build

        model = build(Path(folder) / "model", size=args.size, hidden=args.hidden, dtype="float32")
        for name in args.rows:
            for ranks in args.ranks:
                if (ranks > 1) == ("axis" in ROWS[name]):
                    how = {
                        **ROWS[name],
                        "model": str(model),
                        "ranks": ranks,
                        "batch": args.batch,
                        "tokens": args.tokens,
                    }
                    found = {"row": name, "ranks": ranks, "measured": _run(how), "plan": _plan(how)}
                    results.append(found)
                    if not args.json:
                        print(_line(found), flush=True)
    if args.json:
        print(json.dumps(results))
        return
    print(f"\nworst of parameters, gradients, moments: {_worst(results, KEPT):.1%}")
    print(f"worst of activations: {_worst(results, ['activations']):.1%}")
    print(f"worst of peaks: {_worst(results, ['peak']):.1%}")
    same = [found for found in results if found["row"] not in SENDS_MORE]
    print(f"worst of bytes sent: {_worst(same, ['sent']):.1%}")


def off(found: dict[str, Any], part: str) -> float:
    """Plan over measured, less 1; 0 where both are nothing."""
    plan, measured = found["plan"][part], found["measured"][part]
    return 0.0 if plan == measured else plan / measured - 1 if measured else float("inf")


def _worst(results: list[dict[str, Any]], parts: Any) -> float:
    return max(abs(off(found, part)) for found in results for part in parts)


def _line(found: dict[str, Any]) -> str:
    cells = [
        f"{found['plan'][part] / 2**20:.1f} / {found['measured'][part] / 2**20:.1f} "
        f"({off(found, part):+.1%})"
        for part in PARTS
    ]
    return f"| {found['row']} | {found['ranks']} | " + " | ".join(cells) + " |"


def _plan(how: dict[str, Any]) -> dict[str, int]:
    from divergence.domains.training.plan import Wanted, plan_training
    from divergence.recording.engines.load import Loading, empty_model

    loaded = empty_model(
        Loading(
            how["model"], dtype=how.get("dtype"), attn_implementation=how.get("attention", "eager")
        )
    )
    axis = how.get("axis")
    plan = plan_training(
        loaded,
        Wanted(
            batch=how["batch"],
            tokens=how["tokens"],
            mesh=None if axis is None else f"{axis}={how['ranks']}",
            zero=how.get("zero"),
            optimizer=how.get("optimizer"),
            main_weights=how.get("main"),
            autocast=how.get("autocast"),
            gradient_checkpointing=how.get("checkpointing", False),
        ),
    )
    kept = {part.name: part.bytes for part in plan.kept}
    used = next(one for one in plan.activations if one.checkpointing == plan.checkpointing)
    return {
        "parameters": kept["parameters"],
        "gradients": kept["gradients"],
        "moments": kept.get("moments", 0) + kept.get("main weights", 0),
        "activations": used.saved_bytes + used.gathered_bytes,
        "peak": plan.peak_bytes or 0,
        "sent": sum(one.bytes_per_rank for one in plan.traffic),
    }


def _run(how: dict[str, Any]) -> dict[str, int]:
    start = [sys.executable]
    if how["ranks"] > 1:
        start += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(how["ranks"]),
        ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*start, __file__, "--one", json.dumps(how)], env=environ, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def _measure(**how: Any) -> None:
    """Two steps in this process, one of ``ranks``; the first prints what they took."""
    import torch
    import transformers  # noqa: F401  # not to be counted

    rank, ranks = int(os.environ.get("RANK", "0")), how["ranks"]
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    ids = torch.arange(how["batch"] * how["tokens"]).view(how["batch"], -1) % 500
    low = getattr(torch, how.get("autocast") or "bfloat16")
    at: dict[str, int] = {}
    first, stepper, _ = _built({**how, "axis": None, "ranks": 1, "zero": None, "main": None}, at)
    first(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # what is loaded at first use
    stepper.step()
    del first, stepper
    _mark(at, "empty")
    model, optimizer, after = _built(how, at)
    _mark(at, "built")
    for _ in range(2):
        watch = _watch()
        _mark(at, "start")
        with watch:
            with torch.autocast("cpu", low, enabled=how.get("autocast") is not None):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            _mark(at, "forward")
            loss.backward()
            del loss
            after()
            optimizer.step()
        _mark(at, "stepped")
        model.zero_grad(set_to_none=True)
        _mark(at, "end")
    getattr(optimizer, "optim", optimizer).state.clear()
    _mark(at, "dropped")
    if rank == 0:
        found = {
            "parameters": at["model"] - at["empty"],
            "gradients": at["stepped"] - at["end"],
            "moments": at["end"] - at["dropped"],
            "activations": at["forward"] - at["start"],
            "peak": watch.peak - at["empty"],
            "sent": watch.sent,
        }
        found["gradients"] += at["wrapped"] - at["model"]  # DDP's buckets
        if how.get("main"):
            found["moments"] += at["built"] - at["wrapped"]
        print(json.dumps(found))
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def in_use() -> int:
    """Bytes that malloc has handed out and not got back, in all arenas and of its own mappings."""
    names = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in names]

    read = ctypes.CDLL(None).mallinfo2
    read.restype = Mallinfo2
    found = read()
    return found.uordblks + found.hblkhd


def _mark(at: dict[str, int], name: str) -> None:
    """Without what only python's collector lets go of."""
    gc.collect()
    at[name] = in_use()


def _built(how: dict[str, Any], at: dict[str, int]) -> tuple[Any, Any, Any]:
    """The model as it is trained, its optimizer, and what is done between backward and step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(how["model"])
    ranks, axis = how["ranks"], how.get("axis")
    model: Any = AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, how.get("dtype", "float32")),
        attn_implementation=how.get("attention", "eager"),
    )
    model.train()
    if how.get("checkpointing"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    make = torch.optim.SGD if how.get("optimizer") == "sgd" else torch.optim.AdamW
    if axis == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if axis == "tp":
        from divergence.recording.engines.load import distribution, divide
        from divergence.recording.processes import Ranks, parse_mesh

        division = Ranks(parse_mesh(f"tp={ranks}", ranks), "cpu")
        model = divide(model, distribution(division), division)
    _mark(at, "model")
    if axis == "dp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    _mark(at, "wrapped")
    if how.get("zero") == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make)
        return model, optimizer, lambda: None
    if not how.get("main"):
        return model, make(model.parameters()), lambda: None
    weights = list(model.parameters())
    main = [torch.nn.Parameter(one.detach().float()) for one in weights]
    optimizer = make(main)

    def widen() -> None:
        """One at a time, as a fused kernel would: no float32 copy of all gradients."""
        for wide, one in zip(main, weights, strict=True):
            wide.grad = one.grad.float()
            # stepped here, so that the copy can go
            _step_one(optimizer, wide, main)
            with torch.no_grad():
                one.copy_(wide)
            wide.grad = None

    return model, optimizer, widen


def _step_one(optimizer: Any, wide: Any, main: list[Any]) -> None:
    """The optimizer skips parameters without a gradient."""
    assert sum(one.grad is not None for one in main) == 1
    optimizer.step()
    wide.grad = None


def _watch() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        """The most bytes in use, and those that this rank sends in collectives."""

        def __init__(self) -> None:
            super().__init__()
            self.sent = self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.peak = max(self.peak, in_use())
            result = func(*args, **(kwargs or {}))
            self.peak = max(self.peak, in_use())
            kind, name = func.namespace, func._opname
            if kind in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
                tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
                n = torch.distributed.get_world_size()
                whole = max(t.nbytes for t in tensors)
                factor = 2 if name.replace("_", "").startswith("allreduce") else 1
                self.sent += factor * whole * (n - 1) // n
            return result

    return Watch()


if __name__ == "__main__":
    main()
