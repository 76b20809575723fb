"""How well sketches tell what the bytes would: differences, intervals, verdicts, bytes.

    python benchmarks/sketch.py [--tokens 128] [--architectures llama,gpt2] [--faults 8]

Random models of hidden size 1024 in bfloat16, every module recorded, prompt and three decode
steps. Each pair of runs is compared twice, from the bytes and from sketches: other CPU kernels in
processes of their own (benchmarks/_machines.py), and planted faults of every shape (noise, scale,
one channel, one head, shifted tokens). ``within 15%``: sites whose estimated relative L2 is that
near the exact one; ``held``: whose 95% interval holds it; ``bytes``: what the sketched run stores
over the full one's.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._machines import Machine
from divergence import MachineOptions, RecordOptions
from divergence.comparison.api import compare
from divergence.recording.api import capture
from divergence.run.reader import Run
from tests.models.tiny import build

ARCHITECTURES = {
    "llama": ("model.layers.{}.mlp:out", "model.layers.{}"),
    "qwen3": ("model.layers.{}.self_attn:out", "model.layers.{}"),
    "gpt2": ("transformer.h.{}.mlp:out", "transformer.h.{}"),
    "mamba": ("backbone.layers.{}.mixer:out", "backbone.layers.{}"),
}
MACHINES = ("aten-default", "mkl-compatible", "old")
FAULTS = (
    "noise:0.1",
    "scale:1.2",
    "scale:1.05",
    "channel:5:8",
    "zero:0-63",
    "roll",
    "cast:float8_e4m3fn",
    "bias:0.1",
)


class Tally:
    """Estimated against exact differences of many sites."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.held = 0

    def add(self, exact, estimated) -> None:
        known = {(s.pass_, s.sample, s.step, s.site): s for s in exact.sites}
        for site in estimated.sites:
            one = known.get((site.pass_, site.sample, site.step, site.site))
            if site.estimated is None or one is None or not one.rel_l2 or self.skips(site):
                continue
            self.ratios.append(site.rel_l2 / one.rel_l2)
            # two measurements of one number agree to the kernel's own precision
            slack = 1e-5 * one.rel_l2
            self.held += site.estimated.low - slack <= one.rel_l2 <= site.estimated.high + slack

    def skips(self, site) -> bool:
        return False

    def row(self) -> str:
        if not self.ratios:
            return "-"
        near = sum(abs(ratio - 1) <= 0.15 for ratio in self.ratios) / len(self.ratios)
        off = sorted(abs(ratio - 1) for ratio in self.ratios)
        return (
            f"{len(off):6d} | {100 * near:5.1f}% | {100 * statistics.median(off):5.1f}% | "
            f"{100 * off[int(0.95 * len(off))]:5.1f}% | {100 * self.held / len(off):5.1f}%"
        )


class Prefill(Tally):
    def skips(self, site) -> bool:
        return site.step > 0


class Decode(Tally):
    def skips(self, site) -> bool:
        return site.step == 0


def without_anchors(path: Path) -> Run:
    """The run as it would be without its anchored pass."""
    run = Run.open(path)
    plan = msgspec.structs.replace(run.manifest.plan, passes=["free"], anchored_to=None)
    manifest = msgspec.structs.replace(run.manifest, plan=plan)
    return Run(run.path, manifest, [r for r in run.records if r.pass_ == "free"])


def verdict_of(report) -> str:
    onset = report.verdict.onset
    return report.verdict.kind + (f" at {onset.block or onset.site}" if onset else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--faults", type=int, default=len(FAULTS))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    tallies = {
        (kind, phase): tally()
        for kind in ("machines", "faults")
        for phase, tally in (("prefill", Prefill), ("decode", Decode))
    }
    shares: list[tuple[str, float]] = []
    alarms: list[str] = []
    found: dict[str, list[bool]] = {
        "anchored, full": [],
        "anchored, sketch": [],
        "free, sketch": [],
        "free, full": [],
    }
    missed: list[str] = []
    machines = {name: Machine(name) for name in MACHINES}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in options.architectures.split(","):
            root = Path(folder) / architecture
            root.mkdir()
            model = build(architecture, root / "model", hidden=1024, num_blocks=4)
            prompts = root / "prompts.jsonl"
            ids = [(7 * i * i + 3 * i) % 500 + 6 for i in range(options.tokens)]
            prompts.write_text(f'{{"input_ids": {ids}}}\n')
            common = {
                "prompts_file": prompts,
                "max_new_tokens": 4,
                "sites": ["modules"],
                "probe": False,
            }
            full = capture(str(model), out=root / "full", **common)
            sketched = capture(str(model), out=root / "sketch", store="sketch", **common)
            sizes = [run.manifest.sizes.stored_bytes for run in (full, sketched)]
            shares.append((architecture, sizes[1] / sizes[0]))

            def three(name: str, make, full=full, sketched=sketched, root=root) -> list:
                """The candidate in full, sketched and anchored, sketched alone, in full from
                free runs alone: reports."""
                runs = [root / f"{name}-{one}" for one in ("full", "anchored", "alone")]
                make(runs[0], full.path, None)
                make(runs[1], full.path, "sketch")
                make(runs[2], sketched.path, "sketch")
                return [
                    compare(full, runs[0]),
                    compare(full, runs[1]),
                    compare(sketched, runs[2]),
                    compare(full, without_anchors(runs[0])),
                ]

            for name, machine in machines.items():

                def elsewhere(out, like, store, machine=machine) -> None:
                    machine.ask("capture", like=str(like), out=str(out), store=store, probe=False)
                    machine.wait()

                reports = three(name, elsewhere)
                for kind, report in zip(found, reports, strict=True):
                    if report.verdict.kind not in ("within_floor", "identical"):
                        alarms.append(f"{architecture}, {name}, {kind}: {verdict_of(report)}")
                for phase in ("prefill", "decode"):
                    tallies["machines", phase].add(reports[0], reports[1])
                    tallies["machines", phase].add(reports[0], reports[2])
            place, block = (text.format(2) for text in ARCHITECTURES[architecture])
            for number, fault in enumerate(FAULTS[: options.faults]):

                def here(out, like, store, place=place, fault=fault) -> None:
                    capture(
                        like=like,
                        out=out,
                        store=store,
                        machine=MachineOptions(probe=False),
                        recording=RecordOptions(plants=[f"{place}={fault}"]),
                    )

                reports = three(f"fault{number}", here)
                for kind, report in zip(found, reports, strict=True):
                    onset = report.verdict.onset
                    right = onset is not None and onset.block == block
                    found[kind].append(right)
                    if not right:
                        text = f"{architecture}, {fault}, {kind}: {verdict_of(report)}"
                        missed.append(text)
                for phase in ("prefill", "decode"):
                    tallies["faults", phase].add(reports[0], reports[1])
                    tallies["faults", phase].add(reports[0], reports[2])
            print(f"# {architecture}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(f"prompt {options.tokens} tokens, hidden 1024, bfloat16, all modules\n")
    print("| pairs | phase | sites | within 15% | median off | 95% off | held |")
    print("|---|---|---|---|---|---|---|")
    for (kind, phase), tally in tallies.items():
        print(f"| {kind} | {phase} | {tally.row()} |")
    print("\nbytes: " + ", ".join(f"{name} {100 * share:.1f}%" for name, share in shares))
    print(
        f"healthy pairs with an alarm: {len(alarms)} of {len(found) * len(MACHINES) * len(shares)}",
        *alarms,
        sep="\n  ",
    )
    for kind, right in found.items():
        print(f"faults at the right block, {kind}: {sum(right)} of {len(right)}")
    print(*missed, sep="\n")


if __name__ == "__main__":
    main()
