"""selftest(): does the tool work on this device? Every path that touches it, against the CPU.

A small random model is built on the spot, recorded on the CPU and computed there in float64; then
the device repeats it in every way that the tool knows. A step fails where a healthy repetition is
judged to be more than rounding, where a planted fault is not found in its block and on its side,
where what must be equal bit for bit is not, or where the tool breaks. What the device lacks
(float64, a second device) is left out and said.

One failure stops nothing: the next step is tried, and the file holds them all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from divergence._version import __version__
from divergence.comparison.api import compare
from divergence.comparison.result import Report
from divergence.domain import hook_places, placed
from divergence.errors import DivergenceError, first_line
from divergence.experiments.localization.localize import localize
from divergence.experiments.result import Selftest, Step, StepStatus
from divergence.experiments.selfcheck import runs_folder
from divergence.experiments.tiny import build
from divergence.facts import Fact, fact, plain, sentence, worded
from divergence.ops.replay import replay
from divergence.recording.api import make_run
from divergence.recording.api import truth as make_truth
from divergence.recording.machine import collect_environment, resolve_device
from divergence.run.manifest import Environment, Switch
from divergence.run.reader import Run
from divergence.words import Progress, letter, silent

_PROMPTS = (
    "A bridge is built twice: once on paper.",
    "In 1687 it was said that every body attracts every other body; 2 + 2 = 4.",
)
_DTYPES = ("float32", "bfloat16", "float16")
_HEALTHY = ("identical", "within_floor")
_BLOCK = "model.layers.1"
_FAULT = f"{_BLOCK}.mlp.down_proj:out=scale:1.25"


class _Failed(Exception):
    """A step saw something else than what must be."""


class _Skipped(Exception):
    """The device has not what this step is about."""


def selftest(
    device: str = "auto",
    *,
    quick: bool = False,
    keep: str | Path | None = None,
    progress: Progress | None = None,
) -> Selftest:
    """Try every path of the tool that touches ``device``; what was seen, step by step.

    ``quick``: without the longest steps. ``keep``: a directory for the runs, which are
    otherwise removed.

    Raises UsageError for a device that is not there; KeyboardInterrupt carries what was done so
    far as its argument.
    """
    name = resolve_device(device)
    environment = collect_environment(name)
    steps: list[Step] = []
    with runs_folder(keep) as folder:
        bench = Bench(name, folder, environment)

        def result(*, complete: bool) -> Selftest:
            return Selftest(
                tool_version=__version__,
                device=name,
                environment=environment,
                switches=bench.switches,
                fallbacks=bench.fallbacks,
                steps=steps,
                complete=complete,
            )

        try:
            wanted = list(_steps(bench, quick))
            for number, (title, work) in enumerate(wanted):
                (progress or silent)("selftest", number, len(wanted), title)
                steps.append(_tried(title, work))
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(result(complete=False)) from interrupt
        return result(complete=True)


def _tried(title: str, work: Callable[[], Fact]) -> Step:
    began = time.perf_counter()
    status: StepStatus = "ok"
    seen, detail = None, ""
    try:
        seen = work()
    except _Skipped as reason:
        status, detail = "skipped", str(reason)
    except (_Failed, DivergenceError) as error:
        status, detail = "failed", str(error)
    except Exception as error:  # what a device's runtime raises is its own
        status, detail = "failed", f"{type(error).__name__}: {first_line(error, most=300)}"
    seconds = round(time.perf_counter() - began, 3)
    return worded(Step(name=title, status=status, seconds=seconds, seen=seen, detail=detail))


def _steps(bench: Bench, quick: bool) -> Iterator[tuple[str, Callable[[], Fact]]]:
    yield _title("references"), bench.references
    for dtype in _DTYPES:
        yield _title("healthy", dtype=dtype), partial(bench.healthy, dtype)
    yield _title("repeats"), bench.repeats
    for store in ("sketch", "stats", "hash"):
        yield _title("stored", store=store), partial(bench.stored, store)
    yield _title("batch"), bench.batch
    yield _title("whole"), bench.whole
    yield _title("planted"), bench.planted
    yield _title("operators"), bench.operators
    yield _title("localized"), bench.localized
    yield _title("mapped"), bench.mapped
    yield _title("truth_there"), bench.truth_there
    yield _title("measured_there"), bench.measured_there
    yield _title("second"), bench.second
    for step in (step for place in hook_places("selftest").values() for step in placed(place)):
        if not (quick and step.slow):
            yield step.title, partial(placed(step.function), bench)


def _title(code: str, **values: str) -> str:
    return sentence(fact(f"experiments.step_{code}", **values))


class Bench:
    """The runs that steps share, made by the first that needs them."""

    def __init__(self, device: str, folder: Path, environment: Environment) -> None:
        self.device, self._folder, self._environment = device, folder, environment
        self._kind = device.partition(":")[0]
        self.switches: list[Switch] = []
        self.fallbacks: list[str] = []

    def path(self, name: str) -> Path:
        return self._folder / name

    def capture(
        self, name: str, like: str | Run, *, device: str | None = None, **values: Any
    ) -> Run:
        source = self.path(like) if isinstance(like, str) else like
        run = make_run(
            like=source,
            out=self.path(name),
            device=device or self.device,
            force=True,
            probe=False,
            **values,
        )
        settings = run.manifest.settings
        self.switches = self.switches or settings.switches
        self.fallbacks = list(dict.fromkeys([*self.fallbacks, *settings.cpu_fallbacks]))
        return run

    def _compared_with(self, name: str, *, like: str = "cpu-float32") -> Report:
        return compare(self.path(like), self.path(name), truth=self.path(f"{like}-truth"))

    def references(self) -> Fact:
        model = self.path("model")
        if not (model / "config.json").is_file():
            build(model, num_blocks=3)
        for dtype in _DTYPES:
            run = make_run(
                model,
                out=self.path(f"cpu-{dtype}"),
                dtype=dtype,
                device="cpu",
                max_new_tokens=4,
                prompts=_PROMPTS,
                sites=["modules"],
                truth="no",
                force=True,
            )
            make_truth(run, out=self.path(f"cpu-{dtype}-truth"), force=True)
        cpu = run.manifest.environment.cpu
        return fact("experiments.seen_references", num=len(_DTYPES), cpu=cpu)

    def healthy(self, dtype: str) -> Fact:
        self.capture(dtype, f"cpu-{dtype}", escalate=dtype != "float32")
        return healthy(self._compared_with(dtype, like=f"cpu-{dtype}"))

    def repeats(self) -> Fact:
        repeated = self.capture("repeated", "cpu-bfloat16", repeat=3).manifest.repeatability
        if repeated.num_different:
            raise _Failed(
                f"{repeated.num_different} of {repeated.num_compared} repeated tensors differ, "
                f"first at {repeated.first_difference}"
            )
        return fact("experiments.seen_repeats", num=repeated.num_compared)

    def stored(self, store: str) -> Fact:
        self.capture(store, "cpu-float32", store=store)
        return _identical(compare(self.path("float32"), self.path(store)))

    def batch(self) -> Fact:
        self.capture("batch", "cpu-float32", batch=True)
        return healthy(self._compared_with("batch"))

    def whole(self) -> Fact:
        run = self.capture("whole", "cpu-float32", whole=True, anchor=False)
        return healthy(compare(run))

    def planted(self) -> Fact:
        self.capture("planted", "cpu-float32", plants=[_FAULT])
        verdict = self._compared_with("planted").verdict
        block, side = None if verdict.onset is None else verdict.onset.block, verdict.side
        if verdict.kind != "localized" or block != _BLOCK or side not in (None, "candidate"):
            raise _Failed(f"{verdict.kind}: {verdict.summary}")
        return plain(verdict.summary)

    def operators(self) -> Fact:
        self.capture("operators", "cpu-float32", sites=[f"ops@{_BLOCK}"], weights=True)
        run = replay(
            self.path("operators"), out=self.path("replayed"), device=self.device, force=True
        )
        skipped = sum(run.manifest.plan.skipped_operators.values())
        report = compare(self.path("operators"), run)
        return _identical(report).with_values(num_skipped=skipped or None)

    def localized(self) -> Fact:
        done = localize(
            self.path("cpu-float32"),
            self.path("planted"),
            out=self.path("localized"),
            truth=self.path("cpu-float32-truth"),
            here="both",
            device=self.device,
            force=True,
        )
        sites = " ".join(level.site or "" for level in done.levels)
        if f"{_BLOCK}.mlp.down_proj" not in sites:
            raise _Failed(f"named {sites.strip() or 'nothing'}; {done.stopped or ''}")
        if done.side not in (None, "candidate"):
            raise _Failed(f"blames {letter(done.side)}")
        return plain(sites.strip())

    def mapped(self) -> Fact:
        if self._kind == "cpu":
            raise _Skipped("the CPU is one device")
        self.capture("mapped", "cpu-float32", device_map="auto")
        return _identical(compare(self.path("float32"), self.path("mapped")))

    def truth_there(self) -> Fact:
        self._needs_float64()
        make_truth(
            self.path("cpu-float32"), out=self.path("truth-there"), device=self.device, force=True
        )
        a, b = Run.open(self.path("cpu-float32-truth")), Run.open(self.path("truth-there"))
        worst = 0.0
        for record in a.records:
            other = b.find((record.pass_, record.sample, record.step, record.site))
            if other is None or not record.dtype.startswith("float"):
                continue
            x, y = a.read(record).double(), b.read(other).double()
            worst = max(worst, float((x - y).norm() / x.norm().clamp_min(1e-300)))
        if worst > 1e-9:
            raise _Failed(f"two float64 truths differ by rel L2 {worst:.1e}")
        return fact("experiments.seen_truths", rel_l2=worst)

    def measured_there(self) -> Fact:
        if self._kind == "cpu":
            raise _Skipped("compare measures on the CPU anyway")
        self._needs_float64()
        here = self._compared_with("float32")
        there = compare(
            self.path("cpu-float32"),
            self.path("float32"),
            truth=self.path("cpu-float32-truth"),
            device=self.device,
        )
        worst = 0.0
        for site, other in zip(here.sites, there.sites, strict=True):
            x, y = site.rel_l2, other.rel_l2
            if x is None or y is None:  # ones that are not known are equal
                worst = max(worst, 0.0 if x is y else math.inf)
            else:
                worst = max(worst, abs(x - y) / max(x, 1e-30))
        if here.verdict.kind != there.verdict.kind or worst > 1e-6:
            raise _Failed(
                f"{there.verdict.kind} for {here.verdict.kind}; a figure differs by "
                f"{worst:.1e} of itself"
            )
        return fact("experiments.seen_figures", num=len(here.sites), apart=worst)

    def second(self) -> Fact:
        if self._environment.num_devices < 2:
            raise _Skipped("there is one device")
        index = int(self.device.partition(":")[2] or 0)
        other = f"{self._kind}:{1 if index == 0 else 0}"
        self.capture("second", "cpu-float32", device=other)
        seen = _identical(compare(self.path("float32"), self.path("second")))
        return seen.with_values(device=other)

    def _needs_float64(self) -> None:
        import torch

        try:
            matrix = torch.ones(2, 2, dtype=torch.float64, device=self.device)
            float((matrix @ matrix).sum())
        except Exception as error:
            text = first_line(error, most=120)
            raise _Skipped(f"the device has no float64 matrix product: {text}") from None


def healthy(report: Report, *, also: tuple[str, ...] = ()) -> Fact:
    verdict = report.verdict
    if verdict.kind not in (*_HEALTHY, *also):
        raise _Failed(f"{verdict.kind}: {verdict.summary}")
    used = max((s.limit_usage for s in report.sites if s.limit_usage is not None), default=0.0)
    worst = max((s.rel_l2 or 0.0 for s in report.sites if s.pass_ == "anchored"), default=0.0)
    return fact(
        "experiments.seen_healthy",
        kind=verdict.kind,
        num=_num_compared(report),
        rel_l2=worst,
        usage=None if verdict.kind == "identical" else used,
    )


def _num_compared(report: Report) -> int:
    calls = 0 if report.operators is None else len(report.operators.results)
    return report.coverage.num_compared + calls


def _identical(report: Report) -> Fact:
    if report.verdict.kind != "identical":
        raise _Failed(f"{report.verdict.kind}: {report.verdict.summary}")
    return fact(
        "experiments.seen_identical", num=_num_compared(report), num_skipped=None, device=None
    )
