"""Training steps on several gloo ranks against one process: healthy, and with faults of the loop.

    python benchmarks/training_ranks.py             # both tables; six minutes on two cores
    python benchmarks/training_ranks.py --health    # healthy pairs alone
    python benchmarks/training_ranks.py --faults    # planted faults alone

Tiny models of random weights, four prompts of 7 to 12 tokens, AdamW with clipping. One process runs
sdpa attention where the ranks run eager. Faults (tests/recording/training/rank_faults.py) run for
real on two ranks; the faulty side is the candidate and the reference by turns. Verdicts without a
truth, and with one.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import divergence
from divergence import Report, Run
from tests.domains.training.step.rank_faults import BLOCK
from tests.domains.training.step.test_ranks import FAULTS, IDS, STEP
from tests.models import tiny
from tests.recording.test_ranks import make

MODELS = (("llama", "float32"), ("llama", "bfloat16"), ("qwen3-moe", "float32"))
STAGES = {0: "dp", 1: "dp", 2: "fsdp", 3: "fsdp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--health", action="store_true", help="healthy pairs alone")
    parser.add_argument("--faults", action="store_true", help="planted faults alone")
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="divergence-ranks-") as name:
        folder = Path(name)
        references = {
            (kind, dtype): divergence.capture(
                str(tiny.build(kind, folder / f"{kind}-{dtype}", dtype=dtype, num_blocks=2)),
                out=folder / f"{kind}-{dtype}-one",
                prompts=IDS,
                attn_implementation="sdpa",
                **STEP,
            )
            for kind, dtype in MODELS
        }
        if not given.faults:
            health(references, folder)
        if not given.health:
            faults(references, folder)


def again(reference: Run, **options: Any) -> dict[str, Any]:
    return {"like": reference.path, "attn_implementation": "eager", "probe": False, **options}


def health(references: dict[tuple[str, str], Run], folder: Path) -> None:
    print("| model | dtype | ranks | ZeRO | verdict | tensors of parameters | share of a limit |")
    print("|---|---|---|---|---|---|---|")
    for ranks in (2, 3, 4):
        listed = {
            f"{kind} {dtype} {stage}": again(one, mesh=mesh, zero=stage)
            for (kind, dtype), one in references.items()
            for stage, mesh in STAGES.items()
            # transformers divides experts among ranks evenly alone
            if not (kind == "qwen3-moe" and mesh == "fsdp" and ranks == 3)
        }
        (folder / str(ranks)).mkdir()
        made = make(folder / str(ranks), listed, ranks=ranks)
        for name in listed:
            kind, dtype, stage = name.split()
            report = divergence.compare(references[kind, dtype], made(name))
            own = [one for one in report.sites if "#" in one.site and ":out." in one.site]
            usage = max(one.limit_usage or 0.0 for one in own)
            cells = (kind, dtype, ranks, stage, report.verdict.kind, len(own), f"{usage:.0%}")
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def right(fault: str, mesh: str, report: Report, side: str) -> bool:
    """Is the place the fault's, and the rank, where it is one rank's?"""
    verdict = report.verdict
    if verdict.onset is None:
        return False
    site, word = verdict.onset.site, "B" if side == "candidate" else "A"
    if fault in ("stale", "one divides"):
        told = f"rank 1 of {word} disagrees" if mesh == "dp" else "in the share of rank 1"
        if told not in verdict.summary:
            return False
    if fault == "skipped":
        return site == "loss#backward:out" and verdict.onset.sample == 3
    gradient = "#backward:out." in site
    return gradient and (fault not in ("stale", "early") or site.startswith(f"{BLOCK}."))


def faults(references: dict[tuple[str, str], Run], folder: Path) -> None:
    print("\n| fault | mesh | model | dtype | side | verdict | onset | place | side named |")
    print("|---|---|---|---|---|---|---|---|---|")
    (folder / "faults").mkdir()
    keys = [
        (fault, mesh, kind, dtype)
        for fault in FAULTS
        for mesh in ("dp", "fsdp")
        for kind, dtype in references
        if (fault, mesh) != ("early", "fsdp")  # FSDP sends each micro-batch's gradients
    ]
    listed = {
        " ".join(key): again(references[key[2], key[3]], mesh=key[1], fault=key[0]) for key in keys
    }
    made = make(folder / "faults", listed)
    truths = {
        key: divergence.truth(one, out=folder / f"{'-'.join(key)}-truth")
        for key, one in references.items()
    }
    sides = itertools.cycle(("candidate", "reference"))
    placed = sided = misplaced = 0
    for key in keys:
        fault, mesh, kind, dtype = key
        side, one, bad = next(sides), references[kind, dtype], made(" ".join(key))
        runs = (one, bad) if side == "candidate" else (bad, one)
        plain = divergence.compare(*runs)
        judged = divergence.compare(*runs, truth=truths[kind, dtype])
        found = right(fault, mesh, plain, side) and right(fault, mesh, judged, side)
        placed, sided = placed + found, sided + (judged.verdict.side == side)
        named = {plain.verdict.side, judged.verdict.side} & {"candidate", "reference"}
        misplaced += (not found and judged.verdict.onset is not None) or bool(named - {side})
        site = "-" if judged.verdict.onset is None else judged.verdict.onset.site
        cells = (
            fault,
            mesh,
            kind,
            dtype,
            side,
            judged.verdict.kind,
            site,
            "right" if found else "WRONG",
            str(judged.verdict.side),
        )
        print("|", " | ".join(cells), "|", flush=True)
    print(
        f"\nof {len(keys)}: {placed} at the right place, {sided} with the right side; "
        f"{misplaced} wrongly"
    )


if __name__ == "__main__":
    main()
