"""Pairs of engines: healthy ones, and ones with a fault on the engine's side.

    python benchmarks/engines.py [--engines compile onnx] [--architectures llama qwen3]
                                 [--model DIR ...] [--dtypes float32 bfloat16 float16]
                                 [--hidden 128] [--python ENGINE=PYTHON ...]
                                 [--faults [--strengths 1 0.1 0.01] [--out FILE]]

Small random models (3 blocks), and the checkpoints of ``--model``. transformers makes the reference
and the truth, and the engine repeats it. Of a healthy pair the largest relative L2 of a block's
output is printed, where each block got the reference's input (anchored, prefill and decode steps)
and in the free run. Any verdict beyond within_floor is a false alarm.

``--faults``: every fault of benchmarks/_engine_faults.py, on the engine's side alone, its weights
digested as the healthy ones are (so it is a fault of what the engine made of them). Counted are:
was it found, is the block the right one, and the side; beside each engine the same faults in
transformers with other attention kernels (a pair that rounds alike differs by its fault alone).
``--out`` keeps each answer as a line.

vLLM lives in an environment of its own: ``--python vllm=/there/bin/python``, and ``--hidden 128``,
since its kernels want heads of 32 or more. ONNX files of other sizes than the tests have and of
``--model`` are exported here, for which onnxscript must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._engine_faults import (  # noqa: E402
    FAULTS,
    WEIGHTS,
    faulty_checkpoint,
    faulty_graph,
)
from benchmarks._machines import Machine  # noqa: E402
from divergence.comparison.api import compare  # noqa: E402
from divergence.comparison.result import Report  # noqa: E402
from divergence.errors import first_line  # noqa: E402
from divergence.run.reader import Run  # noqa: E402
from tests.models import onnx_graphs, tiny  # noqa: E402

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Hello there"]
NUM_BLOCKS = 3
HEALTHY = ("identical", "within_floor")
COLUMNS = (
    "model",
    "dtype",
    "engine",
    "prefill, anchored",
    "decode, anchored",
    "free",
    "tokens equal",
    "limit used",
    "verdict",
    "side",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What ``compare`` says of one planted fault."""

    model: str
    dtype: str
    engine: str
    fault: str
    block: int
    strength: float
    verdict: str
    place: str | None
    side: str | None
    confidence: str
    usage: float
    """Of the limit at its largest site; 1 is the limit."""
    is_there: bool
    """Is the place the block, or the module outside all blocks, that has the fault?"""

    @property
    def key(self) -> tuple[str, str, str, int, float]:
        return self.model, self.dtype, self.fault, self.block, self.strength

    @property
    def found(self) -> bool:
        return self.verdict not in (*HEALTHY, "undetermined")


@dataclass(slots=True)
class Bench:
    """One model in one dtype: transformers' run of it, the truth, and its ONNX file."""

    name: str
    dtype: str
    checkpoint: Path
    home: Path
    machines: dict[str, Machine]
    is_random: bool
    healthy: dict[str, Run] = field(default_factory=dict)
    file: Path | None = None

    def start(self, num_tokens: int) -> None:
        """Make the reference and the truth."""
        self._run(
            "transformers",
            "capture",
            model=self.checkpoint,
            out=self.home / "a",
            prompts=PROMPTS,
            max_new_tokens=num_tokens,
            dtype=self.dtype,
        )
        self._run("transformers", "truth", run=self.home / "a", out=self.home / "truth")

    def _run(self, on: str, what: str, **values: object) -> None:
        if what == "capture":
            values |= {"probe": False}
        if values.get("engine") == "transformers":  # with other kernels, or the pair has equal bits
            values |= {"attn_implementation": "sdpa"}
        self.machines[on].run(what, **values)

    def _source(self, engine: str) -> Path:
        if engine != "onnx":
            return self.checkpoint
        if self.file is None:
            name = self.name if self.dtype == "float32" else f"{self.name}-{self.dtype}"
            place = self.home / "graph"
            if self.is_random and name in onnx_graphs.MODELS:
                self.file = onnx_graphs.build(name, self.checkpoint, place)
            else:
                self.file = onnx_graphs.export(self.checkpoint, place, dtype=self.dtype)
        return self.file

    def pair(self, engine: str) -> Report:
        """The engine's run against the reference. Raises what a capture does."""
        out = self.home / engine
        self._run(
            engine,
            "capture",
            model=self._source(engine),
            like=self.home / "a",
            out=out,
            engine=engine,
        )
        self.healthy[engine] = Run.open(out)
        return compare(self.home / "a", out, truth=self.home / "truth")

    def faulty(self, engine: str, fault: str, block: int, strength: float) -> Answer:
        """The same with a fault in the engine."""
        changed, out, planted = self.home / "changed", self.home / "faulty", None
        source = self._source(engine)
        if engine == "onnx":
            source = faulty_graph(source, self.checkpoint, changed, fault, block, strength)
        elif fault in WEIGHTS:
            source = faulty_checkpoint(source, changed, fault, block, strength)
        else:
            planted = fault, block, strength
        self._run(
            engine,
            "capture",
            model=source,
            like=self.home / "a",
            out=out,
            engine=engine,
            engine_fault=planted,
        )
        shutil.rmtree(changed, ignore_errors=True)
        run = Run.open(out)
        run.manifest.model = self.healthy[engine].manifest.model  # its weights were read as right
        report = compare(self.home / "a", run, truth=self.home / "truth")
        verdict, onset = report.verdict, report.verdict.onset
        return Answer(
            model=self.name,
            dtype=self.dtype,
            engine=engine,
            fault=fault,
            block=block,
            strength=strength,
            verdict=verdict.kind,
            side=verdict.side,
            place=None if onset is None else onset.site,
            confidence=verdict.confidence,
            usage=_usage(report),
            is_there=verdict.kind == "localized"
            and onset is not None
            and onset.site.startswith(_where(report, fault, block)),
        )


def _usage(report: Report) -> float:
    return max(one.limit_usage or 0.0 for one in report.sites)


def _where(report: Report, fault: str, block: int) -> str:
    """Where a fault lies: of the rotary table in its module, where that is recorded on both sides,
    else in the first block that uses it."""
    if fault != "rotary":
        return f"model.layers.{block}:"
    table = "model.rotary_emb:"
    return table if any(one.site.startswith(table) for one in report.sites) else "model.layers.0:"


def healthy_row(bench: Bench, engine: str) -> str:
    try:
        report = bench.pair(engine)
    except (RuntimeError, ImportError) as error:  # the machine's; or the exporter is not there
        cells = ["-"] * 5 + [f"refused: {_reason(error)}"]
        return " | ".join([bench.name, bench.dtype, engine, *cells, "-"])
    sites = [one for one in report.sites if one.role == "block" and one.site.endswith(":out")]
    parts = (
        [one.rel_l2 or 0 for one in sites if one.pass_ == "anchored" and one.step == 0],
        [one.rel_l2 or 0 for one in sites if one.pass_ == "anchored" and one.step],
        [one.rel_l2 or 0 for one in sites if one.pass_ == "free"],
    )
    verdict = report.verdict
    return " | ".join(
        [
            bench.name,
            bench.dtype,
            engine,
            *(f"{max(part):.1e}" if part else "-" for part in parts),
            f"{report.tokens.num_equal} of {report.tokens.num_tokens}",
            f"{_usage(report):.0%}",
            f"`{verdict.kind}`",
            verdict.side or "-",
        ]
    )


def _reason(error: Exception) -> str:
    """Without the machine and the kind of error before it, and the particulars behind it."""
    return first_line(error).removeprefix("native: ").removeprefix("ModelError: ").split(": ")[0]


def planned(strengths: list[float]) -> Iterator[tuple[str, int, float]]:
    """Every fault, its block another one each time."""
    for number, (fault, strength) in enumerate((f, s) for f in FAULTS for s in strengths):
        yield fault, 0 if fault == "rotary" else number % NUM_BLOCKS, strength


def of(part: list[Answer], whole: list[Answer]) -> str:
    return f"{len(part)} of {len(whole)}"


def fault_tables(answers: list[Answer]) -> None:
    """Rates of each engine, beside those of the same faults in transformers; and each answer that
    is another."""
    columns = (
        "dtype",
        "engine",
        "found",
        "right block",
        "right side",
        "wrong side",
        "wrong block, not of low confidence",
    )
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    plain = {one.key: one for one in answers if one.engine == "transformers"}
    others = [one for one in answers if one.engine != "transformers"]
    for dtype, engine in dict.fromkeys((one.dtype, one.engine) for one in others):
        mine = [one for one in others if (one.dtype, one.engine) == (dtype, engine)]
        print(f"| {dtype} | {engine} | {_rates(mine)} |")
        print(f"| | the same in transformers | {_rates([plain[one.key] for one in mine])} |")
    print("\nOther answers than in transformers:\n")
    for one in others:
        other = plain[one.key]
        if (one.verdict, one.place, one.side) != (other.verdict, other.place, other.side):
            what = f"{one.model} {one.dtype}, {one.fault} × {one.strength:g} in block {one.block}"
            print(f"- {what}: {one.engine} {_said(one)}; transformers {_said(other)}")


def _rates(mine: list[Answer]) -> str:
    there = [one for one in mine if one.is_there]
    elsewhere = [one for one in mine if one.found and one.place and not one.is_there]
    return " | ".join(
        [
            of([one for one in mine if one.found], mine),
            of(there, mine),
            of([one for one in there if one.side == "candidate"], there),
            str(sum(one.side == "reference" for one in mine)),
            str(sum(one.confidence != "low" for one in elsewhere)),
        ]
    )


def _said(one: Answer) -> str:
    shown = (one.verdict, one.place, one.side)
    return " ".join(part for part in shown if part) + f" (limit used {one.usage:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", nargs="+", default=["compile", "onnx"])
    parser.add_argument("--architectures", nargs="*", default=["llama", "qwen3"])
    parser.add_argument("--model", nargs="*", default=[], type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--faults", action="store_true", help="plant faults in random models")
    parser.add_argument("--strengths", nargs="+", type=float, default=[1.0, 0.1, 0.01])
    parser.add_argument("--out", type=Path, help="append each fault's answer to this .jsonl file")
    parser.add_argument("--tables", type=Path, nargs="+", help="print those of stored answers")
    args = parser.parse_args()
    if args.tables:
        lines = [line for file in args.tables for line in file.read_text().splitlines()]
        fault_tables([Answer(**json.loads(line)) for line in lines])
        return
    pythons = dict(one.split("=", 1) for one in args.python)
    machines = {
        engine: Machine("native", python=pythons.get(engine, sys.executable))
        for engine in dict.fromkeys(["transformers", *args.engines])
    }
    if not args.faults:
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        for bench in benches(args, machines, Path(folder)):
            bench.start(args.tokens)
            for engine in args.engines if not args.faults else machines:
                row = healthy_row(bench, engine)
                if not args.faults:
                    print(f"| {row} |", flush=True)
                elif engine in bench.healthy:
                    for planted in planned(args.strengths):
                        answers.append(bench.faulty(engine, *planted))
                        if args.out:
                            with args.out.open("a") as file:
                                file.write(json.dumps(asdict(answers[-1])) + "\n")
            shutil.rmtree(bench.home)
    for machine in machines.values():
        machine.close()
    if answers:
        fault_tables(answers)


def benches(
    args: argparse.Namespace, machines: dict[str, Machine], folder: Path
) -> Iterator[Bench]:
    """Each model in each dtype."""
    for name in args.architectures:
        for dtype in args.dtypes:
            home = folder / f"{name}-{dtype}"
            checkpoint = tiny.build(
                name, home / "model", dtype=dtype, num_blocks=NUM_BLOCKS, hidden=args.hidden
            )
            yield Bench(name, dtype, checkpoint, home, machines, is_random=args.hidden is None)
    for model in () if args.faults else args.model:
        for dtype in args.dtypes:
            yield Bench(
                model.name,
                dtype,
                model,
                folder / f"{model.name}-{dtype}",
                machines,
                is_random=False,
            )


if __name__ == "__main__":
    main()
