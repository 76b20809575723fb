"""What capture costs beside the bare model, and beside other ways to store the same tensors.

    python benchmarks/capture_overhead.py [--hidden 512] [--blocks 8] [--prompt 128] [--new 32]
        [--ways blocks modules ...] [--python nnsight=/other/venv/bin/python ...]

hooks           plain hooks that clone every block's output, and one torch.save
blocks          divergence capture, --sites blocks (default)
modules         divergence capture, --sites modules: every module's inputs and outputs
modules:sketch  the same with --store sketch; so blocks:stats, modules:hash ...
hooks modules   plain hooks that clone every module's inputs and outputs, and one torch.save
empty hooks     a hook before and one after every module that do nothing
copying hooks   the same with the copies of ``modules``, and nothing written: the limit
debugger, nnsight, msprobe: see _capture_peers.py

Each way has a process of its own (``--together``: all one), in which it and the bare model take
turns. Its time is from the
first forward until everything is written (the run closed, the file saved); what happens once per
capture and not per token (loading, digesting weights) is not counted. Wall ratios (the median of
rounds) move with what else the machine does. CPU: processor time of all threads, of the least
disturbed round of each; its ratio is what a capture costs where the model leaves no core idle.
MiB: how far the resident memory's peak rises above the bare model's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEFAULT_WAYS = [
    "hooks",
    "blocks",
    "blocks:stats",
    "modules",
    "modules:sketch",
    "modules:stats",
    "modules:hash",
    "hooks modules",
    "empty hooks",
    "copying hooks",
    "debugger",
    "nnsight",
    "msprobe",
]


def build(args: argparse.Namespace) -> Any:
    """A random Llama; its values do not matter, only its shapes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.blocks,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128),
        vocab_size=args.vocab,
        max_position_embeddings=max(4096, args.prompt + args.new),
        attn_implementation="eager",
    )
    torch.set_default_dtype(getattr(torch, args.dtype))  # never wider, which a large one needs
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def loaded_model(model: Any) -> Any:
    import torch

    from divergence.recording.engines.load import LoadedModel

    model.config.architectures = ["LlamaForCausalLM"]
    return LoadedModel(
        source="benchmark",
        revision=None,
        task="causal-lm",
        module=model,
        tokenizer=None,
        device=torch.device("cpu"),
        trust_remote_code=False,
    )


class Captured:
    """divergence's own free pass over a model that is loaded already. ``way``: SITES[:STORE]."""

    def __init__(self, model: Any, ids: Any, new: int, way: str, *, buffer: str = "512MiB") -> None:

        from divergence.options.commands import CaptureOptions
        from divergence.recording.api import Capture
        from divergence.recording.machine import Determinism
        from divergence.recording.request import resolve_request

        sites, _, store = way.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompt.jsonl"
            file.write_text(json.dumps({"input_ids": ids[0].tolist()}) + "\n")
            options = CaptureOptions(
                task="causal-lm",
                device="cpu",
                prompts_file=file,
                batch=False,
                max_new_tokens=new,
                sites=(sites,),
                deterministic=False,
                anchor=False,
                store=store or None,
                buffer=buffer,
                probe=False,
            )
            request = resolve_request("benchmark", like=None, options=options)
        from divergence.recording.engines.sessions import TorchSession

        session = TorchSession(loaded_model(model))
        self._capture = Capture(request, session, "cpu", Determinism(), lambda *_: None)
        self.manifest = self._capture._manifest(None)

    def __call__(self, model: Any, ids: Any, new: int, folder: Path) -> None:

        from divergence.recording.engines.sessions import about_bytes

        capture, free = self._capture, self._capture.passes[0]
        self.manifest.sizes = type(self.manifest.sizes)()
        seen = about_bytes(model, capture.selection.hooked, capture.samples, new)
        with capture._storage(folder / "run", self.manifest, capture.request.store, seen) as writer:
            capture._forwards(capture._recorder(writer, free), free)


def work(args: argparse.Namespace) -> None:
    """Some ways in this process, in turns with the bare model: prints a JSON object by way."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from _capture_peers import PEERS, generate

    if args.threads:
        torch.set_num_threads(args.threads)
    model = build(args)
    ids = torch.randint(0, args.vocab, (1, args.prompt))
    ways, bares = {}, {}
    for name in args.work.split(","):
        if name in PEERS:
            make, bares[name] = PEERS[name]
            ways[name] = make()
        else:
            ways[name] = Captured(model, ids, args.new, name, buffer=args.buffer)
            bares[name] = generate
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    for bare in set(bares.values()):
        bare(model, ids, min(args.new, 2), folder)
    from divergence.cli.garbage import hold, release

    hold()
    release()  # as in the command, where capture has begun
    costs: dict[Any, list[tuple[float, float, int]]] = {}
    sizes = {}
    try:
        for _ in range(args.rounds + 1):  # the first round warms up
            for key, command in [*((bare, bare) for bare in set(bares.values())), *ways.items()]:
                place = folder / "kept"
                place.mkdir()
                peak_again()
                start, cpu = time.perf_counter(), time.process_time()
                command(model, ids, args.new, place)
                wall, cpu = time.perf_counter() - start, time.process_time() - cpu
                costs.setdefault(key, []).append((wall, cpu, peak_bytes()))
                sizes[key] = size_of(folder)
                for entry in folder.iterdir():
                    if entry.is_dir():
                        shutil.rmtree(entry)
    finally:
        shutil.rmtree(folder)
    answers = {}
    for name, way in ways.items():
        own, bare = costs[name], costs[bares[name]]
        made = getattr(getattr(way, "manifest", None), "sizes", None)
        answers[name] = {
            "bare": [wall for wall, _, _ in bare[1:]],
            "way": [wall for wall, _, _ in own[1:]],
            "bare cpu": [cpu for _, cpu, _ in bare[1:]],
            "way cpu": [cpu for _, cpu, _ in own[1:]],
            "stored": sizes[name][0],
            "files": sizes[name][1],
            "records": 0 if made is None else made.num_records,
            "seen": 0 if made is None else made.seen_bytes,
            # of the first round: later the allocator still holds what the way before took
            "grown": own[0][2] - bare[0][2],
            "threads": torch.get_num_threads(),
        }
    print(json.dumps(answers))


def size_of(folder: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)


def peak_again() -> None:
    """The peak of resident memory counts from here on (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=0, help="of the model; 0: torch's own choice"
    )
    parser.add_argument("--buffer", default="512MiB")
    parser.add_argument("--ways", nargs="+", default=DEFAULT_WAYS)
    parser.add_argument("--python", nargs="*", default=[], metavar="WAY=PYTHON")
    parser.add_argument(
        "--together", action="store_true", help="all ways in one process: a model is made once"
    )
    parser.add_argument("--folder", default=None, help="where to write; default: the system's own")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    pythons = dict(one.split("=", 1) for one in args.python)
    rows, threads = [], 0
    for ways in [",".join(args.ways)] if args.together else args.ways:
        for row, threads_here in measured(ways, args, pythons.get(ways, sys.executable)):
            threads = threads_here or threads
            rows.append(row)
            print(row, file=sys.stderr)
    print(
        f"Llama, {args.blocks} blocks, hidden {args.hidden}, {args.dtype}, prompt {args.prompt}, "
        f"{args.new} new tokens, {threads} threads, {args.rounds} rounds, "
        f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores\n"
    )
    print("| way | s | × bare | × bare, CPU | added CPU s | MB stored | files | records | MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


def measured(ways: str, args: argparse.Namespace, python: str) -> list[tuple[str, int]]:
    """Rows of the table, and the threads of the model there."""
    options = [
        word
        for name in (
            "hidden",
            "blocks",
            "vocab",
            "prompt",
            "new",
            "dtype",
            "rounds",
            "threads",
            "buffer",
        )
        for word in (f"--{name}", str(getattr(args, name)))
    ]
    if args.folder:
        options += ["--folder", args.folder]
    done = subprocess.run(
        [python, __file__, "--work", ways, *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [(f"| {ways} | not run: {last} | | | | | | | |", 0)]
    rows = []
    for way, found in json.loads(done.stdout.strip().splitlines()[-1]).items():
        pairs = zip(found["way"], found["bare"], strict=True)
        ratio = statistics.median(own / bare for own, bare in pairs)
        own, bare = min(found["way cpu"]), min(found["bare cpu"])
        grown = "" if "," in ways else f"{found['grown'] / 2**20:.0f}"
        row = (
            f"| {way} | {statistics.median(found['way']):.2f} | {ratio:.2f} | {own / bare:.2f} "
            f"| {own - bare:.2f} | {found['stored'] / 1e6:.1f} | {found['files']} "
            f"| {found['records'] or ''} | {grown} |"
        )
        rows.append((row, found["threads"]))
    return rows


if __name__ == "__main__":
    main()
