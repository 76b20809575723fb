"""The time of a capture and of its truth, and the memory that the truth takes.

    python benchmarks/truth_time.py [--random] [--prompts 3] [--tokens 24] [--rounds 3]
                                    [--old CHECKOUT]

The model is the trained one (_trained.py), or with --random a random one of its size; bfloat16,
chat prompts. Each capture and each truth runs in a process of its own, and by another checkout of
this project in turns. The clock starts when everything is imported and ends with the written run:
loading, digests and, in a capture, the probe of the arithmetic are in it. The peak is the process's
own (the largest anonymous resident size) beyond what it had when the passes began. Processor
seconds, of all threads, say more than seconds where other work keeps the machine busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._trained import CHAT_PROMPTS, checkpoint  # noqa: E402

TIMED = """
import json, sys, threading, time
from pathlib import Path
from divergence.recording.api import capture, truth
import transformers.generation.utils

what, source, out, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

peak, loaded, done = [0.0], [0.0], threading.Event()

def watch():
    while not done.wait(0.02):
        peak[0] = max(peak[0], own())

def progress(event, count, total, detail):
    if event == "free" and not loaded[0]:
        loaded[0] = own()

threading.Thread(target=watch, daemon=True).start()
start, cpu = time.perf_counter(), time.process_time()
(capture if what == "capture" else truth)(source, out=out, force=True, progress=progress, **options)
spent, cpu = time.perf_counter() - start, time.process_time() - cpu
done.set()
print(json.dumps([spent, cpu, peak[0] - loaded[0]]))
"""


def random_model(folder: Path) -> Path:
    """Of the trained one's sizes, with its tokenizer left out."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def timed(checkout: Path, what: str, source: Path, out: Path, **options: object) -> list[float]:
    """Seconds, seconds of processors, and MiB beyond what was loaded."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED, what, str(source), str(out), json.dumps(options)],
        capture_output=True, text=True, cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", action="store_true", help="a random model, not the trained one")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--old", type=Path, help="another checkout, measured in turns")
    args = parser.parse_args()
    checkouts = {"truth": ROOT} | ({"truth before": args.old.resolve()} if args.old else {})
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        options: dict[str, object] = {"max_new_tokens": args.tokens}
        if args.random:
            model = random_model(work / "model")
            options["prompts"] = [
                [7 * i % 1000 + 3 for i in range(36 + n)] for n in range(args.prompts)
            ]
        else:
            model = checkpoint("bfloat16")
            options |= {"prompts": list(CHAT_PROMPTS[: args.prompts]), "chat": True}
        taken: dict[str, list[list[float]]] = {name: [] for name in ("capture", *checkouts)}
        for number in range(args.rounds):
            taken["capture"].append(timed(ROOT, "capture", model, work / "run", **options))
            for name, checkout in checkouts.items():
                taken[name].append(timed(checkout, "truth", work / "run", work / "out"))
            print(f"round {number + 1}", *(round(rows[-1][0], 1) for rows in taken.values()),
                  file=sys.stderr)  # fmt: skip
    print("| | s | × capture | processor s | × capture | peak over loaded, MiB |")
    print("|---|---|---|---|---|---|")
    base = None
    for name, rows in taken.items():
        wall, cpu, peak = (statistics.median(column) for column in zip(*rows, strict=True))
        base = base or (wall, cpu)
        print(
            f"| {name} | {wall:.1f} | {wall / base[0]:.2f} | {cpu:.1f} | {cpu / base[1]:.2f} "
            f"| {peak:,.0f} |"
        )


if __name__ == "__main__":
    main()
