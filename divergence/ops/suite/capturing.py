"""How a suite is run and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from divergence.arithmetic.quick import quick_facts
from divergence.errors import RunFormatError, UsageError, first_line
from divergence.numerics.formats import format_of
from divergence.ops.allowed import Refusal, Unsafe
from divergence.ops.bounds import Checking
from divergence.ops.replay import check_names, decoded, laid_out, operand_value
from divergence.ops.suite.catalog import (
    DEFAULT,
    ChosenOperator,
    case_path,
    cases_in,
    choose,
    find,
    suite_named,
)
from divergence.ops.suite.definition import (
    Arguments,
    Operator,
    Unavailable,
    output_port,
    outputs_of,
    truth_of,
    widened,
)
from divergence.recording.machine import Determinism, deterministic_settings, resolve_device
from divergence.recording.new_run import PlannedSite, SuiteRequest
from divergence.recording.request import taken_from
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import (
    SUITE,
    Manifest,
    ModuleNote,
    Override,
    Plan,
    digest_many,
    digest_tensor,
)
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, PassName, Placement, Record
from divergence.run.site import compile_patterns, join_site, module_of, operator_path
from divergence.run.writer import RunWriter
from divergence.words import Progress

# A case in a run: its sites, its inputs and outputs as records, and how it is read back.
#
# Case ``rms_norm.bfloat16.odd.equal`` of operator ``suite.rms_norm``:
#
#     rms_norm.bfloat16.odd.equal/suite.rms_norm:in.x       each tensor argument
#     rms_norm.bfloat16.odd.equal/suite.rms_norm:out        the first result, with the call
#     rms_norm.bfloat16.odd.equal/suite.rms_norm:out.1      the second
#
# and in a truth, beside results in float64, what they are judged by:
#
#     ...:out.floor     standard deviation of a correct implementation's error before the last
#                       rounding, element by element; of codes the probability of another code
#     ...:out.gain      the same of the scale of each row, <d, R> / ‖R‖², the last rounding included
#     ...:out.scores    of indices: the numbers among which they choose; out.floor is theirs


@dataclass(slots=True)
class CaseWriter:
    """Puts cases into a run, in order. ``pass_``: of this run."""

    writer: RunWriter
    pass_: PassName
    order: int = 0

    def skip(self, reason: str) -> None:
        """Count a case that was not run."""
        skipped = self.writer.manifest.plan.skipped_operators
        skipped[reason] = skipped.get(reason, 0) + 1

    def repeated(self, output: torch.Tensor, again: torch.Tensor, where: str) -> None:
        """Count whether a repetition gave the same bits."""
        counts = self.writer.manifest.repeatability
        counts.num_compared += 1
        if digest_tensor(output) != digest_tensor(again):
            counts.num_different += 1
            counts.first_difference = counts.first_difference or where

    def inputs(self, path: str, operator: str, arguments: Arguments) -> Call:
        """Record the tensors among ``arguments``; returns the call that uses them."""
        place = operator_path(path, operator, 1)
        operands: list[Operand] = []
        plain: dict[str, Any] = {}
        for name, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                plain[name] = value
                continue
            site = join_site(place, f"in.{name}")
            self.put(site, value)
            plain[name] = {"tensor": len(operands)}
            operands.append(
                Operand(
                    site=site,
                    shape=tuple(value.shape),
                    dtype=format_of(value.dtype).name,
                    stride=None if value.is_contiguous() else tuple(value.stride()),
                )
            )
        return Call(operator=operator, arguments=plain, operands=tuple(operands))

    def put(
        self, site: str, tensor: torch.Tensor, call: Call | None = None, *,
        placement: Placement | None = None,
    ) -> None:  # fmt: skip
        """``placement``: of what several ranks record, which part this one is."""
        item = CapturedTensor(tensor.detach().to("cpu", copy=True).contiguous())
        self.writer.put(
            item, pass_=self.pass_, sample=0, step=0, site=site, order=self.order, call=call,
            placement=None if placement is None else (placement,),
        )  # fmt: skip
        self.order += 1


def calls_in(run: Run) -> list[Record]:
    """The records of a run that carry a suite's calls, in order."""
    return [record for record in run.records if record.call is not None]


def arguments_of(run: Run, record: Record) -> Arguments:
    """The recorded arguments of a call, with their recorded strides. Raises RunFormatError."""
    call = record.call
    assert call is not None
    try:
        check_names(call)
        tensors = []
        for operand in call.operands:
            if 0 in (operand.stride or ()):
                raise Refusal("an operand's elements share memory")
            tensors.append(laid_out(operand_value(run, record, operand, None), operand.stride))
        return {name: decoded(value, tensors, "cpu") for name, value in call.arguments.items()}
    except Refusal as refusal:
        why = f"{refusal}: {refusal.detail}" if refusal.detail else str(refusal)
        raise RunFormatError(
            f"a call of the suite cannot be repeated: {why}", where=f"{run.path}, {record.site}"
        ) from refusal


# Captures a suite as a run: each operator called on its cases.
#
# A fresh run draws the inputs (the same bytes everywhere). A repeat and the truth read the recorded
# bytes; the truth computes each operator by its definition in float64. What an implementation here
# cannot do is skipped, and counted with its reason.

_REFUSED = (
    RuntimeError, AssertionError, TypeError, ValueError, IndexError, AttributeError, KeyError
)  # fmt: skip
"""What operators raise for operands that do not fit."""


@dataclass(frozen=True, slots=True)
class CaseWork:
    """One case to run. ``load``: its arguments, on the CPU."""

    path: str
    operator: Operator
    load: Callable[[], Arguments]


def capture_suite(suite: str, request: SuiteRequest) -> Run:
    """Run ``suite`` (``llm``) here, or the one that is repeated again, and record it.

    Of the options those that mean something to a suite; ``sites`` are patterns of cases,
    ``rms_norm.*``. Raises UsageError, RunFormatError (of ``like``), RunExistsError and
    RunWriteError.
    """
    options, like, progress = request.options, request.like, request.progress
    device, chosen = resolve_device(options.device), choose(options.impl)
    skipped: dict[str, int] = {}
    wanted = list(options.sites) or ["*"]
    works = _works(suite, like, wanted, skipped)
    source = f"{SUITE}{suite}" if like is None else like.manifest.model.source
    if like is not None:
        said = [f"{len(works)} recorded cases", f"seed {request.seed}"]
        progress("taken", 0, None, taken_from(like.path, said))
    with deterministic_settings(
        device.partition(":")[0], seed=request.seed, enabled=request.deterministic
    ) as determinism:
        manifest = _manifest(source, request, works, chosen, wanted, device, determinism)
        manifest.plan.skipped_operators = skipped
        manifest.repeatability.num_runs = options.repeat
        if options.probe:
            progress("probe", 0, None, "")
            manifest.arithmetic = quick_facts(device)
        with RunWriter(request.out, manifest, force=request.force) as writer:
            _record_cases(works, writer, chosen, determinism, device, progress)
            determinism.note_in(manifest.settings)
    return Run.open(request.out)


def truth_of_suite(run: Run, request: SuiteRequest) -> Run:
    """The truth of a suite's run: every case by its definition, in float64, on the CPU."""
    skipped: dict[str, int] = {}
    works = _recorded(run, skipped)
    source, sites = run.manifest.model.source, run.manifest.plan.sites
    manifest = _manifest(source, request, works, {}, sites, "cpu", Determinism())
    manifest.settings.compute_dtype = "float64"
    manifest.plan.skipped_operators = skipped
    with RunWriter(request.out, manifest, force=request.force) as writer:
        cases = CaseWriter(writer, "replayed")
        for number, work in enumerate(works):
            request.progress("truth", number, len(works), work.path)
            place = operator_path(work.path, work.operator.full_name, 1)
            equal = "equal" in work.path.split(".")
            try:
                arguments = work.load()
                with torch.no_grad(), Checking():
                    work.operator.truth(**widened(arguments))
                outputs = list(truth_of(work.operator, arguments, equal=equal))
            except (Unsafe, *_REFUSED) as error:
                why = first_line(error, most=160)
                raise RunFormatError(
                    f"{work.path} is no case of {work.operator.name}: {why}", where=str(run.path)
                ) from error
            for port, tensor in outputs:
                cases.put(join_site(place, port), tensor)
    return Run.open(request.out)


def plan_cases(suite: str, *, like: Run | None, sites: Sequence[str]) -> list[PlannedSite]:
    """What ``capture_suite`` with the same parameters would run."""
    planned = []
    for work in _works(suite, like, list(sites) or ["*"], {}):
        tensors = [value for value in work.load().values() if isinstance(value, torch.Tensor)]
        planned.append(
            PlannedSite.of_case(
                work.path,
                work.operator.name,
                tuple(tensors[0].shape),
                format_of(tensors[0].dtype).name,
                sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            )
        )
    return planned


def _record_cases(
    works: list[CaseWork], writer: RunWriter, chosen: dict[str, ChosenOperator],
    determinism: Determinism, device: str, progress: Progress,
) -> None:  # fmt: skip
    """Each case is run as often as the manifest says, to see whether it repeats itself."""
    manifest = writer.manifest
    cases = CaseWriter(writer, "free" if manifest.like is None else "replayed")
    inputs: list[tuple[str, str]] = []

    def results(work: CaseWork, arguments: Arguments) -> tuple[torch.Tensor, ...]:
        """On the CPU. A vendor's kernel may write to its inputs, so it gets copies."""
        if manifest.like is not None:  # a run chose them: torch's own sees them first
            with torch.no_grad(), Checking():
                work.operator.run(**_copied(arguments, "cpu"))
        there = _copied(arguments, device)
        before = determinism.num_fallbacks
        with torch.no_grad():
            made = outputs_of(chosen[work.operator.full_name].call(**there))
        if determinism.num_fallbacks > before:  # nothing that the device computed
            raise Unavailable(f"the CPU ran it in place of {device}")
        return tuple(result.detach().cpu().contiguous() for result in made)

    for number, work in enumerate(works):
        progress("suite", number, len(works), work.path)
        arguments = work.load()
        try:
            outputs = results(work, arguments)
            again = [results(work, arguments) for _ in range(manifest.repeatability.num_runs - 1)]
        except (Unavailable, Unsafe, NotImplementedError, *_REFUSED) as error:
            cases.skip(f"{work.operator.name}: {first_line(error, most=160)}")
            continue
        name = work.operator.full_name
        call = cases.inputs(work.path, name, arguments)
        inputs += [
            (f"{work.path}.{argument}", digest_tensor(value))
            for argument, value in arguments.items()
            if isinstance(value, torch.Tensor)
        ]
        for place, output in enumerate(outputs):
            site = join_site(operator_path(work.path, name, 1), output_port(place))
            cases.put(site, output, None if place else call)
        for others in again:
            for output, other in zip(outputs, others, strict=True):
                cases.repeated(output, other, work.path)
    skipped = manifest.plan.skipped_operators
    if cases.order == 0:
        raise UsageError(
            "nothing was recorded: no operator could be run here", where=next(iter(skipped), None)
        )
    for reason, count in skipped.items():
        progress("note", 0, None, f"{count} cases were skipped: {reason}")
    manifest.model.digest = digest_many(inputs)


def _works(
    suite: str, like: Run | None, patterns: list[str], skipped: dict[str, int]
) -> list[CaseWork]:
    """The cases of ``like``, or of the suite, whose path matches a pattern."""
    if like is not None:
        works = _recorded(like, skipped)
    else:
        works = [
            CaseWork(case_path(operator, case), operator, case.make)
            for operator, case in cases_in(suite_named(suite))
        ]
    matches = compile_patterns(patterns)
    chosen = [work for work in works if matches(f"{work.path}:out")]
    if not chosen:
        raise UsageError(
            f"--sites {' '.join(patterns)} matches no case",
            hint="divergence capture suite:llm --dry-run lists them: 'rms_norm.*', '*.equal'",
        )
    return chosen


def _recorded(run: Run, skipped: dict[str, int]) -> list[CaseWork]:
    """The cases of a run; of operators that this version does not know, only their number."""

    works = []
    for record in calls_in(run):
        assert record.call is not None  # calls_in gives no others
        name = record.call.operator
        try:
            operator = find(name)
        except UsageError as error:
            skipped[error.message] = skipped.get(error.message, 0) + 1
            continue
        load = partial(arguments_of, run, record)
        works.append(CaseWork(module_of(record.site), operator, load))
    if not works:
        raise UsageError(
            f"{run.path} holds no case of a suite",
            hint="divergence capture suite:llm -o RUN makes a run that does",
        )
    return works


def _copied(arguments: Arguments, device: str) -> Arguments:
    """Copies on the device, with the same strides."""
    moved = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            layout = value.shape, value.stride()
            value = torch.empty_strided(*layout, dtype=value.dtype, device=device).copy_(value)
        moved[name] = value
    return moved


def _manifest(
    source: str, request: SuiteRequest, works: list[CaseWork], chosen: dict[str, ChosenOperator],
    sites: list[str], device: str, determinism: Determinism,
) -> Manifest:  # fmt: skip
    """``chosen``: what runs; nothing where definitions do."""
    like = request.like
    recorded = None if like is None else like.manifest
    modules = {}
    for work in works:
        choice = chosen.get(work.operator.full_name)
        kind = "definition" if choice is None else choice.name
        modules[work.path] = ModuleNote(kind=kind, role="inner")
    plan = Plan(
        passes=["free" if recorded is None else "replayed"],
        sites=sites,
        anchored_to=None if recorded is None else recorded.id,
        replayed_pass=None if like is None else calls_in(like)[0].pass_,
        modules=modules,
    )
    manifest = request.manifest(device, plan, source=source, kind="suite", determinism=determinism)
    if recorded is not None:
        manifest.model.config_digest = recorded.model.config_digest
        manifest.model.digest = recorded.model.digest
        used = sorted({choice.name for choice in chosen.values() if choice.name != DEFAULT})
        if used:
            manifest.overrides = [Override(name="impl", reference=DEFAULT, used=", ".join(used))]
    return manifest
