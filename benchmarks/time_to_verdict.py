"""What a person waits for: whole commands, from the shell and back to it.

    python benchmarks/time_to_verdict.py [--rounds 5] [--only commands pairs growth overhead]
                                         [--old CHECKOUT] [--python msprobe=PYTHON ...]

commands  each command of a verdict, on SmolLM2-135M-Instruct in bfloat16 (_trained.py; a random
          model of its shape where the packages that hold it are not installed), one prompt and 16
          tokens; `import torch, transformers` and the bare model, loaded and run, take turns with
          them. *sum*: capture, capture --like, truth and compare --truth
pairs     `compare` of 15,000 small pairs, as text and as JSON, with a truth and without
growth    time and memory of capture and compare, where blocks, tokens, prompts, sites, ranks and
          the elements of each tensor are doubled four times, each size in a process that has done
          nothing before, the least of the rounds: the slope of log time (log MiB) against log size,
          the steeper of the last two doublings; and what a record more takes. Ranks: their
          parts of a run are written in one process. *plain files*: the numbers that ``write``
          makes, made and stored by numpy: what the machine makes of it
overhead  capture's hooks beside the bare model and beside other tools (capture_overhead.py), with
          small decode steps and of about a billion parameters; *copying hooks* are the limit.
          ``--python``: an interpreter that has nnsight or msprobe

Rounds are interleaved, and figures are medians. CPU: seconds of all processes and threads, which
say more where others use the machine. MiB: the largest resident memory of one process. ``--old``:
the same commands by another checkout, in the same rounds; a command whose options it does not know
has no figure there.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
import gc
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("commands", "pairs", "growth", "overhead")
PROMPT = "The capital of France is"
NEW = 16
SINGLE = ("capture", "capture --like", "truth", "compare --truth")
"""What a person types without diff."""
NUM_PAIRS = 15_000
DOUBLINGS = 4
BARE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype="auto", attn_implementation="eager").eval()
ids = torch.tensor([eval(sys.argv[2])])
try:
    text = AutoTokenizer.from_pretrained(sys.argv[1])
except Exception:
    pass
with torch.no_grad():
    model.generate(ids, do_sample=False, max_new_tokens=16, min_new_tokens=16, pad_token_id=0)
"""
WRITE = """
import sys
from pathlib import Path
from benchmarks.compare_records import write_runs
write_runs(Path(sys.argv[1]), int(sys.argv[2]), 576)
"""


@dataclass(frozen=True)
class Cost:
    """Of one command."""

    wall_s: float
    cpu_s: float
    peak_mib: float


class NoSuchOption(Exception):
    """An older checkout does not know it."""


def run(words: Sequence[object], *, checkout: Path = ROOT, into: Path | None = None) -> Cost:
    """One command, from its start to its end. ``into``: a file for what it prints."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    with open(into or os.devnull, "wb") as answer, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            list(map(str, words)), env=env, cwd=checkout, stdout=answer, stderr=errors
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            text = errors.read().decode()[-2000:]
            if checkout != ROOT and "No such option" in text:
                raise NoSuchOption(text)
            raise SystemExit(f"{words} failed:\n{text}")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def tool(*words: object) -> list[object]:
    return [sys.executable, "-m", "divergence", *words, "-q"]


def trained_model(folder: Path) -> tuple[Path, list[object]]:
    """A model of 135 million parameters, and the words that give it a prompt."""
    from benchmarks._trained import checkpoint

    try:
        return checkpoint("bfloat16"), ["--prompt", PROMPT]
    except SystemExit as lacking:
        print(f"a random model of the same shape: {lacking}\n")
    return random_model(folder / "model", 30, hidden=576), prompts_file(folder, 1)


def random_model(folder: Path, num_blocks: int, *, hidden: int, even: bool = False) -> Path:
    """``even``: each projection has the same width, so that sites are counted and not elements."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not folder.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden if even else hidden * 8 // 3,
            num_hidden_layers=num_blocks,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64 if even else max(1, hidden // 192),
            vocab_size=49152 if hidden > 256 else 512,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompts_file(folder: Path, num: int, num_tokens: int = 6) -> list[object]:
    """Words that give a model without a tokenizer so many prompts."""
    file = folder / f"prompts-{num}-{num_tokens}.jsonl"
    rows = [[(7 * i + n) % 500 + 3 for i in range(num_tokens)] for n in range(num)]
    file.write_text("".join(f'{{"input_ids": {row}}}\n' for row in rows))
    return ["--prompts", file]


def medians(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(values) for values in zip(*map(_row, costs), strict=True)))


def _row(cost: Cost) -> tuple[float, float, float]:
    return cost.wall_s, cost.cpu_s, cost.peak_mib


def commands(folder: Path, rounds: int, checkouts: dict[str, Path]) -> None:
    model, prompt = trained_model(folder)
    new = ["--max-new-tokens", NEW]
    costs: dict[str, dict[str, list[Cost]]] = {}

    def note(name: str, version: str, cost: Cost) -> None:
        costs.setdefault(name, {}).setdefault(version, []).append(cost)
        print(f"{name}, {version}: {cost}", file=sys.stderr)

    ids = list(range(3, 8))
    for number in range(rounds):
        importing = run([sys.executable, "-c", "import torch, transformers"])
        note("import torch, transformers", "now", importing)
        note("the bare model", "now", run([sys.executable, "-c", BARE, model, ids]))
        for version, checkout in checkouts.items():
            place = folder / version
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            b, truth = place / "b", place / "truth"
            both = "--attn-implementation", "sdpa"
            steps: dict[str, list[object]] = {
                "capture --truth no": tool(
                    "capture", model, "-o", place / "no", *prompt, *new, "--truth", "no"
                ),
                "capture": tool("capture", model, "-o", place / "own", *prompt, *new),
                "capture --like": tool("capture", "--like", place / "own", "-o", b, *both),
                "truth": tool("truth", place / "own", "-o", truth),
                "compare": tool("compare", place / "own", b),
                "compare --truth": tool("compare", place / "own", b, "--truth", truth),
                "compare --json": tool("compare", place / "own", b, "--json"),
                "check": tool("check", place / "own", b),
            }
            for name, words in steps.items():
                with contextlib.suppress(NoSuchOption):
                    note(name, version, run(words, checkout=checkout))
            singles = [costs[name][version][-1] for name in SINGLE]
            total = [sum(values) for values in zip(*map(_row, singles), strict=True)]
            peak = max(cost.peak_mib for cost in singles)
            note("sum of the single commands", version, Cost(total[0], total[1], peak))
            for name in ("diff", "a second diff of the model"):
                out = place / name.replace(" ", "-")
                words = tool(
                    "diff", model, "--attn-implementation", "eager,sdpa", "-o", out, *prompt, *new
                )
                note(name, version, run(words, checkout=checkout))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    bare = medians(costs["the bare model"]["now"])
    print(f"{rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    head = "".join(f" {name}, s | × bare | CPU s | × bare | MiB |" for name in checkouts)
    print(f"| command |{head}\n|---|{'---|' * 5 * len(checkouts)}")
    for name, versions in costs.items():
        row = f"| {name} |"
        for version in checkouts:
            if version not in versions:
                row += " | | | | |"
                continue
            cost = medians(versions[version])
            row += (
                f" {cost.wall_s:.1f} | {cost.wall_s / bare.wall_s:.2f} | {cost.cpu_s:.1f} "
                f"| {cost.cpu_s / bare.cpu_s:.2f} | {cost.peak_mib:,.0f} |"
            )
        print(row)


def pairs(folder: Path, rounds: int, checkouts: dict[str, Path]) -> None:
    first = next(iter(checkouts.values()))  # what an older one writes the newer one reads
    run([sys.executable, "-c", WRITE, folder / "pairs", NUM_PAIRS], checkout=first)
    a, b, truth = (folder / "pairs" / name for name in ("a", "b", "truth"))
    ways: dict[str, list[object]] = {
        "text": [],
        "--json": ["--json"],
        "--truth": ["--truth", truth],
        "--truth --json": ["--truth", truth, "--json"],
    }
    costs: dict[tuple[str, str], list[Cost]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for _ in range(rounds):
        for version, checkout in checkouts.items():
            for way, more in ways.items():
                out = folder / "answer"
                cost = run(tool("compare", a, b, *more), checkout=checkout, into=out)
                costs.setdefault((way, version), []).append(cost)
                sizes[way, version] = out.stat().st_size
                print(way, version, cost, file=sys.stderr)
    print(
        f"\n{NUM_PAIRS:,} pairs\n\n| answer |"
        + "".join(f" {name}, s | CPU s | MB printed | MiB |" for name in checkouts)
        + f"\n|---|{'---|' * 4 * len(checkouts)}"
    )
    for way in ways:
        row = f"| {way} |"
        for version in checkouts:
            cost = medians(costs[way, version])
            megabytes = sizes[way, version] / 1e6
            row += f" {cost.wall_s:.1f} | {cost.cpu_s:.1f} | {megabytes:.1f} "
            row += f"| {cost.peak_mib:,.0f} |"
        print(row)


SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "act_fn")
GROWS = ("blocks", "tokens", "prompts", "sites", "ranks", "tensors")


def grown(what: str, power: int, folder: Path) -> tuple[int, dict[str, Callable[[], Any]]]:
    """(the size, the commands at that size). The model is there once this was asked."""
    from divergence import capture, compare

    times, a, b = 2**power, folder / "a", folder / "b"
    options: dict[str, Any] = {"max_new_tokens": 8, "sites": ["modules"]}
    num_blocks, num_prompts, size = 4, 1, times
    if what == "blocks":
        num_blocks = size = 4 * times
    elif what == "tokens":
        size = options["max_new_tokens"] = 8 * times
    elif what == "prompts":
        num_prompts = size = 2 * times
    elif what in ("ranks", "tensors"):
        of_ranks = what == "ranks"
        shape = (times, 1000, 64) if of_ranks else (1, 32, times << 18)
        commands = {f"write {run.name}": partial(write_run, run, *shape) for run in (a, b)}
        if not of_ranks:
            commands["plain files"] = partial(write_files, folder / "plain", *shape[1:])
        return shape[0 if of_ranks else 2], {**commands, "compare": partial(compare, a, b)}
    else:
        ports = ("in", "out") if times > len(SITES) else ("out",)
        sites = [f"*.{kind}:{port}" for kind in SITES[:times] for port in ports]
        options = {"max_new_tokens": 16, "sites": sites}
        num_blocks, num_prompts = 16, 4
    options["prompts"] = [[(7 * i + n) % 500 + 3 for i in range(6)] for n in range(num_prompts)]
    model, alike = folder / f"m{num_blocks}", {"force": True, "probe": False}
    apart(partial(random_model, model, num_blocks, hidden=128, even=True))
    return size, {
        "capture": partial(capture, str(model), out=a, truth="no", **alike, **options),
        "capture --like": partial(capture, like=a, out=b, attn_implementation="sdpa", **alike),
        "compare": partial(compare, a, b),
    }


def write_run(folder: Path, num_ranks: int, num_tensors: int, width: int) -> None:
    """What so many ranks write of a run, all in this process: of each tensor a part of ``width``
    elements."""
    from divergence.run.captured import CapturedTensor
    from divergence.run.manifest import Mesh, MeshAxis
    from divergence.run.reader import Run
    from divergence.run.writer import RunWriter

    manifest = Run.open(ROOT / "tests" / "fixtures" / "run-v7").manifest
    manifest.id, manifest.sizes = uuid.uuid4().hex, type(manifest.sizes)()
    manifest.mesh = Mesh(axes=[MeshAxis(name="tp", size=num_ranks)])
    manifest.record_digests = {}
    writers = [RunWriter(folder, manifest, force=True, rank=rank) for rank in range(num_ranks)]
    numbers = random_numbers(num_ranks * num_tensors, width, seed=int(folder.name == "b"))
    for writer in writers:
        for number in range(num_tensors):
            writer.put(
                CapturedTensor(next(numbers)),
                pass_="free",
                sample=0,
                step=number // 20,
                site=f"model.layers.{number % 20}:out",
                order=number % 20,
                placement=("shard:2",),
            )
        writer.flush()
    for writer in reversed(writers):
        writer.close(complete=True)


def random_numbers(num_tensors: int, width: int, *, seed: int) -> Iterator[torch.Tensor]:
    """Tensors whose seeds differ by rounding alone."""
    import torch

    generator, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    for _ in range(num_tensors):
        values = torch.randn(1, max(1, width >> 12), min(width, 1 << 12), generator=generator)
        values *= 1 + 2**-9 * torch.rand(values.shape, generator=noise)
        yield values.to(torch.bfloat16)


def write_files(folder: Path, num_tensors: int, width: int) -> None:
    """The same numbers as of ``write_run``, each in a file of its own."""
    import torch

    folder.mkdir(exist_ok=True)
    for number, values in enumerate(random_numbers(num_tensors, width, seed=0)):
        values.view(torch.int16).numpy().tofile(folder / f"{number}.bin")


def apart(command: Callable[[], Any]) -> tuple[float, float, int]:
    """A command in a process that has imported all and done nothing: (processor seconds, MiB above
    what was there before, records of the run or pairs of the report)."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measured, (command,))


def measured(command: Callable[[], Any]) -> tuple[float, float, int]:
    from capture_overhead import peak_again, peak_bytes

    peak_again()
    before, start = peak_bytes(), time.process_time()
    answer = command()
    cost = time.process_time() - start, (peak_bytes() - before) / 2**20
    records = answer.records if hasattr(answer, "records") else getattr(answer, "sites", ())
    return *cost, len(records)


def grow(what: str, rounds: int, folder: Path) -> None:
    """One thing that grows: prints a JSON object, by command and size."""
    from divergence.cli.garbage import hold, release

    hold()
    for command in grown(what, 0, folder)[1].values():
        command()  # imports
    release()  # as in the commands
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    costs: dict[str, dict[int, list[tuple[float, float, int]]]] = {}
    for _ in range(rounds):
        for power in range(DOUBLINGS + 1):
            size, commands = grown(what, power, folder)
            for name, command in commands.items():
                costs.setdefault(name, {}).setdefault(size, []).append(apart(command))
    print(json.dumps(costs))


def growth(folder: Path, rounds: int, checkouts: dict[str, Path]) -> None:
    """Of this checkout alone."""
    print("\n| command | what grows | sizes | CPU s | slope | MiB above | slope | kB a record |")
    print("|---|---|---|---|---|---|---|---|")
    for what in GROWS:
        place = folder / what
        place.mkdir()
        words = [sys.executable, __file__, "--rounds", rounds, "--grow", what, place]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        for name, by_size in json.loads(done.stdout.splitlines()[-1]).items():
            sizes = sorted(map(int, by_size))
            times, peaks, records = (
                [min(cost[place] for cost in by_size[str(size)]) for size in sizes]
                for place in (0, 1, 2)
            )
            each = ""
            if records[-1] > records[0]:
                each = f"{(peaks[-1] - peaks[0]) * 1024 / (records[-1] - records[0]):.1f}"
            print(
                f"| {name} | {what} | {' '.join(map(str, sizes))} "
                f"| {' '.join(f'{value:.2f}' for value in times)} | {slope(sizes, times):.2f} "
                f"| {' '.join(f'{value:.0f}' for value in peaks)} | {slope(sizes, peaks):.2f} "
                f"| {each} |",
                flush=True,
            )


SMALL = "hooks", "blocks", "modules", "modules:sketch", "modules:stats", "modules:hash"
OVERHEAD: dict[str, list[object]] = {
    "small decode steps": [
        *("--ways", *SMALL, "hooks modules", "empty hooks", "copying hooks"),
        *("debugger", "nnsight", "msprobe"),
    ],
    "a billion parameters": [
        *("--hidden", 2048, "--blocks", 16, "--prompt", 512, "--new", 16, "--dtype", "bfloat16"),
        *("--ways", *SMALL[2:], "hooks modules", "copying hooks"),
    ],
}


def overhead(rounds: int, pythons: Sequence[str], checkouts: Mapping[str, Path]) -> None:
    """Each checkout's program, one after another: in each the bare model takes turns. Of an earlier
    one its own ways alone; the limits and the other tools are the same."""
    for name, options in OVERHEAD.items():
        for label, checkout in checkouts.items():
            print(f"\n{name}, {label}\n", flush=True)
            program = checkout / "benchmarks" / "capture_overhead.py"
            words = [sys.executable, program, "--rounds", rounds, *options]
            words += ["--python", *pythons] if label == "now" else ["--ways", *SMALL[1:]]
            env = {**os.environ, "PYTHONPATH": str(checkout)}
            subprocess.run(list(map(str, words)), check=True, env=env, cwd=checkout)


def slope(sizes: list[int], values: list[float]) -> float:
    """The steeper of the last two doublings, of log against log."""
    steps = [
        math.log(max(values[n], 1e-3) / max(values[n - 1], 1e-3))
        / math.log(sizes[n] / sizes[n - 1])
        for n in range(max(1, len(sizes) - 2), len(sizes))
    ]
    return max(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--old", type=Path, help="another checkout, measured in turns")
    parser.add_argument(
        "--python", nargs="*", default=[], metavar="WAY=PYTHON", help="which has that tool"
    )
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grow:
        grow(args.grow[0], args.rounds, Path(args.grow[1]))
        return
    checkouts = {"now": ROOT} if args.old is None else {"before": args.old.resolve(), "now": ROOT}
    # A user's modules are compiled once; the environment of a container often forbids to keep that.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for checkout in checkouts.values():
        compileall.compile_dir(checkout / "divergence", quiet=1)
    with tempfile.TemporaryDirectory() as name:
        for part in args.only:
            if part == "overhead":
                overhead(args.rounds, args.python, checkouts)
                continue
            {"commands": commands, "pairs": pairs, "growth": growth}[part](
                Path(name), args.rounds, checkouts
            )


if __name__ == "__main__":
    main()
