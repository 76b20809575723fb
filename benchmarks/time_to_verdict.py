"""What a person waits for: whole commands, from the shell and back to it.

    python benchmarks/time_to_verdict.py [--rounds 5] [--only commands pairs growth]
                                         [--old CHECKOUT]

commands  each command of a verdict, on SmolLM2-135M-Instruct in bfloat16 (_trained.py; a random
          model of its shape where the packages that hold it are not installed), one prompt and 16
          tokens; `import torch, transformers` and the bare model, loaded and run, take turns with
          them. *sum*: capture, capture --like, truth and compare --truth
pairs     `compare` of 15,000 small pairs, as text and as JSON, with a truth and without
growth    time and memory of capture and compare, where blocks, tokens, prompts and sites are
          doubled four times: the slope of log time against log size at the last two doublings

Rounds are interleaved, and figures are medians. CPU: seconds of all processes and threads, which
say more where others use the machine. MiB: the largest resident memory of one process. ``--old``:
the same commands by another checkout, in the same rounds. Hooks of other tools beside the capture's
own are in capture_overhead.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("commands", "pairs", "growth")
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
            raise SystemExit(f"{words} failed:\n{errors.read().decode()[-2000:]}")
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


def random_model(folder: Path, num_blocks: int, *, hidden: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not folder.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=num_blocks,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 192),
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
GROWS = ("blocks", "tokens", "prompts", "sites")


def grown(what: str, power: int, folder: Path) -> tuple[int, Path, dict[str, Any]]:
    """(the size, the model, the options of its capture)."""
    times = 2**power
    options: dict[str, Any] = {"max_new_tokens": 8, "sites": ["modules"]}
    num_blocks, num_prompts, size = 4, 1, times
    if what == "blocks":
        num_blocks = size = 4 * times
    elif what == "tokens":
        size = options["max_new_tokens"] = 8 * times
    elif what == "prompts":
        num_prompts = size = 2 * times
    else:
        ports = ("in", "out") if times > len(SITES) else ("out",)
        sites = [f"*.{kind}:{port}" for kind in SITES[:times] for port in ports]
        options = {"max_new_tokens": 16, "sites": sites}
        num_blocks, num_prompts = 16, 4
    options["prompts"] = [[(7 * i + n) % 500 + 3 for i in range(6)] for n in range(num_prompts)]
    return size, random_model(folder / f"m{num_blocks}", num_blocks, hidden=128), options


def grow(what: str, rounds: int, folder: Path) -> None:
    """One thing that grows, in this process: prints a JSON object, by command and size (processor
    seconds, MiB above what was there before)."""
    from capture_overhead import peak_again, peak_bytes

    from divergence import capture, compare
    from divergence.cli.garbage import hold, release

    hold()
    release()  # as in the commands
    costs: dict[str, dict[int, list[tuple[float, float]]]] = {}
    a, b, alike = folder / "a", folder / "b", {"force": True, "probe": False}
    for number in range(rounds + 1):
        for power in range(DOUBLINGS + 1):
            size, model, options = grown(what, power, folder)
            for name, command in {
                "capture": partial(capture, str(model), out=a, truth="no", **alike, **options),
                "capture --like": partial(
                    capture, like=a, out=b, attn_implementation="sdpa", **alike
                ),
                "compare": partial(compare, a, b),
            }.items():
                gc.collect()
                peak_again()
                before, start = peak_bytes(), time.process_time()
                command()
                cost = time.process_time() - start, (peak_bytes() - before) / 2**20
                if number or power:  # the first of all imports
                    costs.setdefault(name, {}).setdefault(size, []).append(cost)
    print(json.dumps(costs))


def growth(folder: Path, rounds: int, checkouts: dict[str, Path]) -> None:
    """Of this checkout alone."""
    print("\n| command | what grows | sizes | CPU s | slope | MiB above | slope |")
    print("|---|---|---|---|---|---|---|")
    for what in GROWS:
        place = folder / what
        place.mkdir()
        words = [sys.executable, __file__, "--rounds", rounds, "--grow", what, place]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        for name, by_size in json.loads(done.stdout.splitlines()[-1]).items():
            sizes = sorted(map(int, by_size))
            times, peaks = (
                [statistics.median(cost[place] for cost in by_size[str(size)]) for size in sizes]
                for place in (0, 1)
            )
            print(
                f"| {name} | {what} | {' '.join(map(str, sizes))} "
                f"| {' '.join(f'{value:.2f}' for value in times)} | {slope(sizes, times):.2f} "
                f"| {' '.join(f'{value:.0f}' for value in peaks)} | {slope(sizes, peaks):.2f} |",
                flush=True,
            )


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
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grow:
        grow(args.grow[0], args.rounds, Path(args.grow[1]))
        return
    checkouts = {"now": ROOT} if args.old is None else {"before": args.old.resolve(), "now": ROOT}
    with tempfile.TemporaryDirectory() as name:
        for part in args.only:
            {"commands": commands, "pairs": pairs, "growth": growth}[part](
                Path(name), args.rounds, checkouts
            )


if __name__ == "__main__":
    main()
