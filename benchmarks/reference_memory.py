"""What the truth of a run costs in memory and time: `divergence truth` in a child process.

    python benchmarks/reference_memory.py [--hidden 1536] [--blocks 8 16] [--vocab 32000]
                                          [--prompt 32] [--keep]

A random Llama of each depth is written to disk in bfloat16, captured and repeated in float64,
each in a process of its own, while a thread reads RssAnon and RssFile from /proc/self/status
twenty times a second (so Linux only). Anonymous memory must be had; file pages (weights that
are mapped, not copied) may be dropped and read again.

loaded    after from_pretrained, before the first forward
passes    the most while the passes run
by step   the most in: load, digest, free pass, anchored pass
keep      without --keep the rule that widened weights are kept where they fit half the free
          memory is told that nothing is free: what a model too large for that costs

The slope between two depths is the cost of each further parameter; the rest (activations, one
operator's widened weights, Python) does not grow with depth. Both together give the estimate
for 7 B parameters. transformers maps weights that are stored in the dtype that is asked for;
converted ones are copied, so the estimate is given with and without them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from divergence.options.commands import BatchOptions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
GIB = 2**30
MACHINE_GIB = 24
SEVEN_B = {"hidden": 4096, "mlp": 11008, "blocks": 32, "heads": 32, "vocab": 32000}
"""Llama 2 7B: 6.74 B parameters."""


# --- the child: everything that is measured ------------------------------------------------------


def resident() -> dict[str, int]:
    """Bytes of anonymous memory and of file pages that this process holds."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


class Peaks:
    """The most of each kind of memory by step, read by a thread."""

    def __init__(self) -> None:
        self.step = "start"
        self.found: dict[str, dict[str, int]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def look(self) -> None:
        most = self.found.setdefault(self.step, {})
        for name, size in resident().items():
            most[name] = max(most.get(name, 0), size)

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.look()


def build(model: Path, *, hidden: int, mlp: int, blocks: int, heads: int, vocab: int) -> dict:
    """Write the model, one block in memory at a time; returns its numbers of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    model.mkdir()
    config.save_pretrained(model)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    draw = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    names: dict[str, str] = {}
    for name, shape in shapes.items():
        block = name.split(".")[2] if ".layers." in name else "rest"
        names[name] = f"model-{block}.safetensors"
        files.setdefault(names[name], {})[name] = shape
    for file, wanted in files.items():
        tensors = {}
        for name, shape in wanted.items():
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 2:
                tensors[name].normal_(0, shape[1] ** -0.5, generator=draw)
        save_file(tensors, model / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": names}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    numels = {name: shape.numel() for name, shape in shapes.items()}
    return {
        "all": sum(numels.values()),
        "block": sum(n for name, n in numels.items() if name.startswith("model.layers.0.")),
        "head": numels["lm_head.weight"],
        "operator": max(n for name, n in numels.items() if ".layers." in name),
    }


def measure(work: Path, *, prompt: int, kept: bool) -> dict:
    """Repeat the run in ``work`` under the thread's eyes."""
    import torch

    torch.set_num_threads(1)
    from divergence.recording import passes
    from divergence.recording.api import truth as make_truth

    if not kept:
        passes.free_bytes = lambda device: 0
    times: dict[str, list[float]] = {}
    peaks = Peaks()

    def progress(event: str, done: int, total: int | None, detail: str) -> None:
        if event != peaks.step and event != "note":
            peaks.look()
            peaks.step = event
        times.setdefault(event, []).append(time.perf_counter())
        if event == "free" and total is None:
            peaks.found["loaded"] = resident()

    peaks.found["before"] = resident()
    with peaks:
        make_truth(work / "run", out=work / "truth", progress=progress, force=True)
    forward_s = times["anchored"][0] - times["free"][0]
    return {"peaks": peaks.found, "forward_s": forward_s, "prompt": prompt}


def capture_run(work: Path, *, prompt: int) -> None:
    from divergence.recording.api import capture

    prompts = work / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": [(7 * i) % 1000 + 3 for i in range(prompt)]}))
    capture(
        str(work / "model"),
        out=work / "run",
        batching=BatchOptions(prompts_file=prompts),
        max_new_tokens=1,
        force=True,
    )


def child(name: str, work: Path, **options: object) -> dict:
    """Call a function of this file in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, str(work), json.dumps(options)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def be_child(name: str, work: Path, options: dict) -> None:
    if name == "build":
        result = build(work / "model", **options)
    elif name == "capture":
        result = capture_run(work, **options)
    else:
        result = measure(work, **options)
    print(json.dumps(result))


# --- the parent: only prints ---------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / GIB:7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--keep", action="store_true", help="keep widened weights where they fit")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        be_child(args.child[0], Path(args.child[1]), json.loads(args.child[2]))
        return
    rows = []
    for blocks in args.blocks:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            shape = {
                "hidden": args.hidden,
                "mlp": args.hidden * 8 // 3,
                "blocks": blocks,
                "heads": args.hidden // 64,
                "vocab": args.vocab,
            }
            numel = child("build", work, **shape)
            child("capture", work, prompt=args.prompt)
            found = child("measure", work, prompt=args.prompt, kept=args.keep)
        rows.append((blocks, numel, found))
        show(blocks, numel, found)
    if len(rows) > 1:
        estimate(rows[0], rows[-1], args)


def show(blocks: int, numel: dict, found: dict) -> None:
    peaks, before = found["peaks"], found["peaks"]["before"]["RssAnon"]
    print(f"\n{blocks} blocks, {numel['all'] / 1e9:.2f} B parameters in bfloat16")
    print("                               GiB")
    for what, size in (
        ("model in bfloat16", numel["all"] * 2),
        ("model in float64", numel["all"] * 8),
        ("one block in float64", numel["block"] * 8),
        ("largest operator in float64", numel["operator"] * 8),
        ("lm_head in float64", numel["head"] * 8),
    ):
        print(f"  {what:28}{gib(size)}")
    print("  resident, anonymous (+ file)")
    for step, most in peaks.items():
        print(f"    {step:26}{gib(most['RssAnon'])} +{gib(most['RssFile'])}")
    most = max(peaks[step]["RssAnon"] for step in ("free", "anchored"))
    loaded = peaks["loaded"]["RssAnon"]
    print(f"  {'passes beyond what is loaded':28}{gib(most - loaded)}")
    print(f"  {'loading beyond the imports':28}{gib(loaded - before)}")
    print(f"  one forward of {found['prompt']} tokens  {found['forward_s']:.1f} s")


def widest(operator: int, head: int) -> int:
    from divergence.recording.widening import SLICE_NUMEL

    return max(min(operator, SLICE_NUMEL), min(head, SLICE_NUMEL))


def estimate(small: tuple, large: tuple, args: argparse.Namespace) -> None:
    """A straight line through two depths, carried on to 7 B."""
    (_, few, one), (_, many, two) = small, large
    more = many["all"] - few["all"]

    def most(found: dict, kind: str) -> int:
        return max(found["peaks"][step][kind] for step in ("free", "anchored"))

    anon, file = ((most(two, k) - most(one, k)) / more for k in ("RssAnon", "RssFile"))
    print(f"\nper further parameter: {anon:.2f} bytes anonymous, {file:.2f} of file pages")
    hidden, mlp, vocab = (SEVEN_B[name] for name in ("hidden", "mlp", "vocab"))
    block = 4 * hidden * hidden + 3 * hidden * mlp + 2 * hidden
    numel = SEVEN_B["blocks"] * block + 2 * hidden * vocab + hidden
    # what does not grow with depth grows with the largest matrix that is widened at once
    wider = widest(hidden * mlp, hidden * vocab) - widest(many["operator"], many["head"])
    size = most(two, "RssAnon") + max(0, anon) * (numel - many["all"]) + 8 * wider
    seconds = two["forward_s"] * numel / many["all"]
    print(
        f"7 B ({numel / 1e9:.2f} B parameters, {numel * 2 / GIB:.1f} GiB in bfloat16) by this line:"
    )
    print(f"  anonymous                   {gib(size)} GiB")
    print(f"  with the weights, copied    {gib(size + 2 * numel)} GiB")
    print(f"  one forward of {args.prompt} tokens  {seconds:.0f} s (one thread)")
    verdict = "fits" if size + 2 * numel < MACHINE_GIB * GIB else "does not fit"
    print(f"  {verdict} a machine of {MACHINE_GIB} GiB")


if __name__ == "__main__":
    main()
