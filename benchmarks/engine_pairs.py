"""Healthy pairs of engines: how far ONNX Runtime is from transformers, block by block.

    python benchmarks/engine_pairs.py [NAME ...]

Tiny random models as torch's exporter writes them (tests/models/onnx_graphs.py), two prompts, a
prefill and two decode steps; of each model the largest relative L2 of any block's output, where
each block got the recorded input (anchored) and in the free run. Needs the extra [onnx].
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from divergence import capture, compare
from tests.models import onnx_graphs, tiny

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Hello there"]


def main(names: list[str]) -> None:
    print("| model | dtype | prefill, anchored | decode, anchored | free | verdict |")
    print("|---|---|---|---|---|---|")
    for name, options in onnx_graphs.MODELS.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measured(name, dict(options), Path(folder))
        print(f"| {options['architecture']} | {options['dtype']} | {row} |", flush=True)


def measured(name: str, options: dict[str, str], place: Path) -> str:
    checkpoint = tiny.build(options.pop("architecture"), place / "checkpoint", **options)
    file = onnx_graphs.build(name, checkpoint, place / "onnx")
    run = capture(checkpoint, out=place / "a", prompts=PROMPTS, max_new_tokens=3, probe=False)
    try:
        other = capture(file, like=run, engine="onnx", out=place / "b", probe=False)
    except Exception as error:
        return f"- | - | - | refused: {str(error).partition(':')[0]}"
    report = compare(run, other)
    notes = run.manifest.plan.modules
    blocks = {f"{path}:out" for path, note in notes.items() if note.role == "block"}
    sites = [site for site in report.sites if site.site in blocks and site.rel_l2 is not None]
    parts = (
        [s.rel_l2 for s in sites if s.pass_ == "anchored" and s.step == 0],
        [s.rel_l2 for s in sites if s.pass_ == "anchored" and s.step],
        [s.rel_l2 for s in sites if s.pass_ == "free"],
    )
    shown = " | ".join(f"{max(part):.1e}" if part else "-" for part in parts)
    return f"{shown} | `{report.verdict.kind}`"


if __name__ == "__main__":
    main(sys.argv[1:])
