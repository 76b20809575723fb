"""What the truth that a run carries costs: time, memory and bytes, beside a capture without.

    python benchmarks/truth_time.py [--models trained-float32 trained-bfloat16 llama moe]
                                    [--modes bare no auto full floor apart]
                                    [--tokens 16] [--rounds 3] [--billions 1] [--device cuda]
    python benchmarks/truth_time.py --paper

trained  SmolLM2-135M (_trained.py), three chat prompts; llama: a random one of --billions
         parameters, moe: a random Mixtral of 8 experts, both in bfloat16, three prompts
bare     the model alone: transformers' generate, greedily, of the same prompts, loading included
no, auto, full, floor    capture --truth; the bytes of floor are told in parts of those of no, which
         keeps --sites blocks
apart    `divergence truth` of the run that ``no`` made: its free and anchored pass, all forwards

Each is a process of its own, one after the other in every round. The clock starts when everything
is imported and ends with the written run: loading, digests and the probe of the arithmetic are in
it. The peak is the largest anonymous resident size beyond what it was when the passes began; with
--device cuda, of what torch allocated there.
Processor seconds, of all threads, say more than seconds where other work keeps the machine busy.

--paper prints what auto would cost for 7 and 70 billion parameters on devices that are not here,
from stated rates alone: nothing of it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._trained import CHAT_PROMPTS, checkpoint  # noqa: E402
from divergence.recording.api import LEAST_SECONDS, SHARE  # noqa: E402
from divergence.recording.widening import SLICE_NUMEL  # noqa: E402

MODELS = ("trained-float32", "trained-bfloat16", "llama", "moe")
MODES = ("bare", "no", "auto", "full", "floor", "apart")
TIMED = """
import json, sys, threading, time
from pathlib import Path
import torch, transformers
from divergence.recording.api import capture, truth
import transformers.generation.utils

mode, source, out, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

peak, loaded, done = [0.0], [0.0], threading.Event()
device = options.pop("device")
if device != "cpu":
    torch.zeros(1, device=device)  # its libraries are loaded before the clock starts
    def own(): return torch.cuda.memory_allocated() / 2**20

def watch():
    while device == "cpu" and not done.wait(0.02):
        peak[0] = max(peak[0], own())

def progress(event, count, total, detail):
    if event == "free" and not loaded[0]:
        loaded[0] = own()
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()

def bare():
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", attn_implementation="eager").to(device)
    prompts, tokens = options["prompts"], options["max_new_tokens"]
    if options.get("chat"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        prompts = [tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
            for text in prompts]
    loaded[0] = own()
    for ids in prompts:
        model.generate(torch.tensor([ids], device=device), do_sample=False, min_new_tokens=tokens,
                       max_new_tokens=tokens, pad_token_id=0)

threading.Thread(target=watch, daemon=True).start()
start, cpu, note = time.perf_counter(), time.process_time(), None
if mode == "bare":
    bare()
elif mode == "apart":
    truth(options["run"], out=out, force=True, device=device, progress=progress)
else:
    note = capture(source, out=out, force=True, device=device, progress=progress, truth=mode,
                   **options).manifest.plan.truth
spent, cpu = time.perf_counter() - start, time.process_time() - cpu
done.set()
if device != "cpu":
    peak[0] = torch.cuda.max_memory_allocated() / 2**20
steps = "" if note is None else "/".join(map(str, note.num_steps))
print(json.dumps([spent, cpu, peak[0] - loaded[0], steps]))
"""


def random_model(kind: str, folder: Path, billions: float, device: str) -> Path:
    """Of a usual shape, in bfloat16, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16)
    common = {"vocab_size": 32000, "num_key_value_heads": 4, "tie_word_embeddings": True}
    if kind == "llama":
        hidden, between, heads = (2048, 5632, 16) if billions < 3 else (4096, 11008, 32)
        # q, o; k, v of four heads; gate, up, down
        block = 2 * hidden * (hidden + 4 * hidden // heads) + 3 * hidden * between
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=between,
            num_attention_heads=heads,
            num_hidden_layers=max(1, round((billions * 1e9 - 32000 * hidden) / block)),
            **common,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        config = MixtralConfig(
            hidden_size=768,
            intermediate_size=2048,
            num_attention_heads=12,
            num_hidden_layers=8,
            num_local_experts=8,
            **common,
        )
        MixtralForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")
    return folder


def timed(mode: str, source: Path, out: Path, options: dict[str, object]) -> list[object]:
    """Seconds, seconds of processors, MiB beyond what was loaded, and the steps of the truth."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED, mode, str(source), str(out), json.dumps(options)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def num_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--billions", type=float, default=1.0, help="parameters of the llama")
    parser.add_argument("--prompt-tokens", type=int, default=24, help="of a random model's prompts")
    parser.add_argument("--device", default="cpu", help="a device of torch: cuda")
    parser.add_argument("--paper", action="store_true", help="an estimate from stated rates")
    args = parser.parse_args()
    if args.paper:
        paper()
        return
    print(
        "| model | mode | s | × no | processor s | × no | peak over loaded, MiB | MB | beyond no "
        "| steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            measure(name, Path(temporary), args)


def measure(name: str, work: Path, args: argparse.Namespace) -> None:
    """The rows of one model."""
    options: dict[str, object] = {"max_new_tokens": args.tokens, "device": args.device}
    if name.startswith("trained"):
        model = checkpoint(name.removeprefix("trained-"))
        options |= {"prompts": list(CHAT_PROMPTS[:3]), "chat": True}
    else:
        model = random_model(name, work / "model", args.billions, args.device)
        options["prompts"] = [
            [7 * i % 1000 + 3 for i in range(args.prompt_tokens + n)] for n in range(3)
        ]
    taken: dict[str, list[list[object]]] = {mode: [] for mode in args.modes}
    for number in range(args.rounds):
        for mode in args.modes:
            more = {"run": str(work / "no")} if mode == "apart" else {}
            taken[mode].append(timed(mode, model, work / mode, options | more))
            print(f"{name}, round {number + 1}, {mode}: {taken[mode][-1]}", file=sys.stderr)
    base = taken.get("no") or next(iter(taken.values()))
    wall_of, cpu_of = (statistics.median(row[place] for row in base) for place in (0, 1))
    for mode, rows in taken.items():
        wall, cpu, peak = (statistics.median(row[place] for row in rows) for place in range(3))
        size = more = ""
        if mode != "bare":
            size = f"{num_bytes(work / mode) / 1e6:,.1f}"
        if mode not in ("bare", "no", "apart") and (work / "no").exists():
            more = f"{num_bytes(work / mode) / num_bytes(work / 'no') - 1:.1%}"
        print(
            f"| {name} | {mode} | {wall:.1f} | {wall / wall_of:.2f} | {cpu:.1f} "
            f"| {cpu / cpu_of:.2f} | {peak:,.0f} | {size} | {more} | {rows[-1][3]} |",
            flush=True,
        )


@dataclass(frozen=True)
class Device:
    """Rates that products reach in practice: half of what data sheets call the peak."""

    name: str
    model_flops: float
    """A second, of products in 16 bits."""
    wide_flops: float
    """In float64, where the truth is computed."""
    bandwidth: float
    """Bytes a second of the memory in which weights are widened."""
    link: float | None = None
    """Bytes a second to the CPU, where blocks are widened there."""


DEVICES = (
    Device("GPU with fast float64", 400e12, 30e12, 2.5e12),
    Device("GPU without", 150e12, 0.6e12, 0.8e12),
    Device("NPU, blocks widened on the CPU", 150e12, 1.0e12, 0.2e12, link=20e9),
)
SIZES = {"7 B": (7e9, 32, 4096), "70 B": (70e9, 80, 8192)}  # parameters, blocks, hidden size
PROMPTS, PROMPT_TOKENS, STEPS = 3, 200, 16
DISK, DIGEST, WRITE = 2e9, 5e9, 1e9  # bytes a second


def paper() -> None:
    """The estimate, with what it rests on."""
    print(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, {STEPS} forwards of each, in 16 bits.")
    print(
        f"A capture reads the weights ({DISK / 1e9:g} GB/s), digests them ({DIGEST / 1e9:g} GB/s), "
        f"runs the model and writes each block's output ({WRITE / 1e9:g} GB/s)."
    )
    print(
        "A forward in float64 reads each weight, writes it wide and reads it again (18 bytes a "
        "parameter), and makes 2 operations a parameter and token; steps are made one by one."
    )
    for device in DEVICES:
        link = "" if device.link is None else f", {device.link / 1e9:g} GB/s to the CPU"
        print(
            f"{device.name}: {device.model_flops / 1e12:g} TFLOP/s in 16 bits, "
            f"{device.wide_flops / 1e12:g} in float64, {device.bandwidth / 1e12:g} TB/s{link}."
        )
    print(
        "The model lies on one device: where weights are spread over several, a run carries no "
        "truth.\n"
    )
    print(
        "| model | device | no, s | a prefill, s | a step, s | truth, s | auto × no "
        "| prefills made | steps after each | more memory, GiB | a block, GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for size, (parameters, blocks, hidden) in SIZES.items():
        for device in DEVICES:
            weights = 2 * parameters
            tokens = PROMPTS * (PROMPT_TOKENS + STEPS - 1)
            plain = weights / DISK + weights / DIGEST + tokens * blocks * hidden * 2 / WRITE
            plain += 2 * parameters * PROMPTS * PROMPT_TOKENS / device.model_flops
            plain += PROMPTS * (STEPS - 1) * weights / device.bandwidth
            step = 9 * weights / device.bandwidth + 2 * parameters / device.wide_flops
            step += 0 if device.link is None else weights / device.link
            prefill = step + 2 * parameters * (PROMPT_TOKENS - 1) / device.wide_flops
            budget = max(LEAST_SECONDS, SHARE * plain)
            num_prefills = min(PROMPTS, max(1, int(budget / prefill)))
            spare = max(0.0, budget - num_prefills * prefill) / num_prefills
            num_steps = min(STEPS - 1, int(spare / step))
            spent = num_prefills * (prefill + num_steps * step)
            slices = 8 * min(SLICE_NUMEL, parameters / blocks) / 2**30
            wide = 8 * PROMPT_TOKENS * 12 * hidden / 2**30  # a block's activations
            row = (
                size,
                device.name,
                f"{plain:.1f}",
                f"{prefill:.2f}",
                f"{step:.2f}",
                f"{spent:.1f}",
                f"{1 + spent / plain:.2f}",
                f"{num_prefills} of {PROMPTS}",
                f"{num_steps} of {STEPS - 1}",
                f"{slices + wide:.1f}",
                f"{8 * parameters / blocks / 2**30:.1f}",
            )
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
