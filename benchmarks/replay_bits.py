"""Are recorded inputs complete? Every operator of small models, run again here: whose bits differ?

Captured and replayed in one process, under the same settings: each difference would be an input
that the recording lacks. Reported beside: what was left out and why, and how long both took.

    python benchmarks/replay_bits.py [ARCHITECTURE ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from divergence.options.commands import LoadOptions, RecordOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from divergence.errors import UsageError
from divergence.ops.replay import replay
from divergence.recording.api import capture
from tests.models import tiny

PROMPT = "A bridge is built twice: once on paper, where every beam is exact."


def main() -> None:
    print(
        "| architecture | dtype | attention | results | other bits | in float64 | left out | "
        "capture s | replay s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    total = different = 0
    for architecture in sys.argv[1:] or tiny.ARCHITECTURES:
        for dtype in ("float32", "bfloat16", "float16"):
            for attention in ("eager", "sdpa"):
                with tempfile.TemporaryDirectory() as folder:
                    row = measure(architecture, dtype, attention, Path(folder))
                if row is not None:
                    total, different = total + row[0], different + row[1]
                    texts = [
                        f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
                        for value in row
                    ]
                    print(f"| {architecture} | {dtype} | {attention} | {' | '.join(texts)} |")
    print(f"\n{total:,} results of operators, {different:,} with other bits")


def measure(architecture: str, dtype: str, attention: str, folder: Path) -> tuple | None:
    """(results, with other bits, in float64, calls left out, seconds, seconds); None where the
    architecture has no such attention."""
    model = tiny.build(architecture, folder / "model", dtype=dtype)
    start = time.perf_counter()
    try:
        run = capture(
            str(model),
            out=folder / "run",
            prompts=[PROMPT],
            max_new_tokens=3,
            sites=["ops@*"],
            recording=RecordOptions(weights=True),
            attn_implementation=attention,
            loading=LoadOptions(trust_remote_code=True),
        )
    except UsageError:
        return None
    captured = time.perf_counter()
    again = replay(run, out=folder / "again", device="cpu")
    done = time.perf_counter()
    truth = replay(run, out=folder / "truth", truth=True)
    recorded = {record.coordinates[1:]: record.xxh3 for record in run.records}
    other = sum(recorded[record.coordinates[1:]] != record.xxh3 for record in again.records)
    left_out = sum(again.manifest.plan.skipped_operators.values())
    return (
        len(again.records),
        other,
        len(truth.records),
        left_out,
        captured - start,
        done - captured,
    )


if __name__ == "__main__":
    main()
