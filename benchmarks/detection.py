"""Which planted faults are found at the right block, per dtype, and how far healthy pairs stay off.

    python benchmarks/detection.py [--dtypes float32,bfloat16,float16]
    python benchmarks/detection.py --axis       # one prompt or step of 1, 8, 64

Four architectures (three-block random models), faults planted at one inner projection of
the first, middle and last block. Where the architecture has attention, the candidate runs
sdpa against the reference's eager: other kernels, as on another machine. Each cell counts
the pairs of 12 in which the verdict was `localized` (or `nonfinite`) at exactly that block:
with the anchored pass / from free runs alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._axis import axis
from divergence import RecordOptions
from divergence.analyses.blocks.units import build_units
from divergence.comparison.api import compare
from divergence.recording.api import capture
from tests.models.tiny import build

PLACES = {
    "llama": "model.layers.{}.mlp.down_proj:out",
    "gpt2": "transformer.h.{}.mlp.c_proj:out",
    "qwen3-moe": "model.layers.{}.self_attn.o_proj:out",
    "mamba": "backbone.layers.{}.mixer.out_proj:out",
}
FAULTS = (
    "scale:1.2",
    "scale:1.05",
    "scale:1.01",
    "scale:1.001",
    "noise:0.3",
    "noise:0.1",
    "noise:0.03",
    "noise:0.01",
    "noise:0.003",
    "bias:0.1",
    "channel:5:1.5",
    "zero:0-15",
    "roll",
    "cast:float8_e4m3fn",
    "cast:int8",
    "cast:bfloat16",
)
PROMPT = "The quick brown fox jumps over the lazy dog, and the numbers should stay the same."


def found(report, site: str) -> bool:
    onset = report.verdict.onset
    block = site.partition(":")[0].rsplit(".", 2)[0]
    return report.verdict.kind in ("localized", "nonfinite") and onset.block == block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--axis", nargs="?", const="prompts,steps", help="prompts, steps alone")
    options = parser.parse_args()
    dtypes = options.dtypes.split(",")
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    if options.axis:
        with tempfile.TemporaryDirectory() as folder:
            axis(Path(folder), dtypes, options.axis.split(","))
        print(f"{time.perf_counter() - start:.0f} s")
        return
    hits = {(fault, dtype): [0, 0] for fault in FAULTS for dtype in dtypes}
    elsewhere = total = 0
    health: dict[str, list[float]] = {}
    alarms = 0
    with tempfile.TemporaryDirectory() as folder:
        for architecture, place in PLACES.items():
            other = {} if architecture == "mamba" else {"attn_implementation": "sdpa"}
            for dtype in dtypes:
                root = Path(folder) / f"{architecture}-{dtype}"
                model = build(architecture, root / "model", dtype=dtype)
                a = capture(
                    str(model), out=root / "a", prompts=[PROMPT], max_new_tokens=4, device="cpu"
                )
                healthy = compare(a, capture(like=a, out=root / "healthy", device="cpu", **other))
                alarms += healthy.verdict.kind not in ("identical", "within_floor")
                shares = [
                    u.typical / u.results[0].limit
                    for u in build_units(healthy.sites, "anchored")
                    if u.results[0].limit
                ]
                health.setdefault(dtype, []).append(max(shares, default=0.0))
                for number in range(3):
                    site = place.format(number)
                    for fault in FAULTS:
                        b = capture(
                            like=a,
                            out=root / "b",
                            force=True,
                            device="cpu",
                            recording=RecordOptions(plants=[f"{site}={fault}"]),
                            **other,
                        )
                        report = compare(a, b)
                        total += 1
                        hit = found(report, site)
                        elsewhere += report.verdict.kind == "localized" and not hit
                        hits[fault, dtype][0] += hit
                        b.records[:] = [r for r in b.records if r.pass_ == "free"]
                        b.manifest.plan.anchored_to = None
                        hits[fault, dtype][1] += found(compare(a, b), site)
    print("| fault | " + " | ".join(dtypes) + " |\n|---|" + "---|" * len(dtypes))
    for fault in FAULTS:
        cells = ("/".join(map(str, hits[fault, dtype])) for dtype in dtypes)
        print(f"| {fault} | " + " | ".join(cells) + " |")
    print(
        f"\n{total} planted pairs, {elsewhere} blamed on another block (anchored); "
        f"{alarms} alarms in {len(PLACES) * len(dtypes)} healthy pairs, whose typical error was "
        "at most "
        + ", ".join(f"{max(v):.2f} ({k})" for k, v in health.items())
        + f" of its limit; {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
