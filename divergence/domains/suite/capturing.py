"""Runs and records a suite of operators: each operator called on its cases.

A fresh run draws the inputs (the same bytes everywhere). A repeat and the truth read the recorded
bytes; the truth computes each operator by its definition in float64. What an implementation here
cannot do is skipped, and counted with its reason.

Case ``rms_norm.bfloat16.odd.equal`` of operator ``suite.rms_norm`` in a run:

    rms_norm.bfloat16.odd.equal/suite.rms_norm:in.x       each tensor argument
    rms_norm.bfloat16.odd.equal/suite.rms_norm:out        the first result, with the call
    rms_norm.bfloat16.odd.equal/suite.rms_norm:out.1      the second

and in a truth, beside results in float64, what they are judged by:

    ...:out.floor     standard deviation of a correct implementation's error before the last
                      rounding, element by element; of codes the probability of another code
    ...:out.gain      the same of the scale of each row, <d, R> / ‖R‖², the last rounding included
    ...:out.scores    of indices: the numbers among which they choose; out.floor is theirs
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from divergence.domains.suite.definition import (
    PREFIX,
    Arguments,
    Operator,
    OperatorCase,
    Unavailable,
    output_port,
    outputs_of,
    truth_of,
    widened,
)
from divergence.domains.suite.operators import OPERATORS
from divergence.errors import RunFormatError, UsageError, first_line
from divergence.numerics.formats import format_of
from divergence.ops.allowed import Refusal, Unsafe
from divergence.ops.bounds import Checking
from divergence.ops.replay import check_names, decoded, laid_out, operand_value
from divergence.recording.cases import (
    CaseRequest,
    CaseWriter,
    Implementations,
    function_named,
    label_of,
    pairs_of,
)
from divergence.recording.machine import resolve_device
from divergence.recording.new_run import PlannedSite
from divergence.recording.request import taken_from
from divergence.run.manifest import (
    SUITE,
    ModuleNote,
    Override,
    Plan,
    digest_many,
    digest_tensor,
)
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, Record
from divergence.run.site import did_you_mean, join_site, module_of, operator_path

_REFUSED = (
    RuntimeError,
    AssertionError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    KeyError,
)
"""What operators raise for operands that do not fit."""


@dataclass(frozen=True, slots=True)
class CaseWork:
    """One case to run. ``load``: its arguments, on the CPU."""

    path: str
    operator: Operator
    load: Callable[[], Arguments]


def capture(name: str, request: CaseRequest) -> Run:
    """Run the suite here, or the one that is repeated again, and record it. Raises UsageError,
    RunFormatError (of ``like``), RunExistsError and RunWriteError."""
    options, like, progress = request.options, request.like, request.progress
    device, chosen = resolve_device(options.device), choose(options.impl)
    skipped: dict[str, int] = {}
    works = _works(name, request, skipped)
    if like is not None:
        taken = [f"{len(works)} recorded cases", f"seed {request.seed}"]
        progress("taken", 0, None, taken_from(like.path, taken))
    names = {work.path: chosen[work.operator.full_name][0] for work in works}
    plan = _plan(request, names, request.patterns)
    plan.skipped_operators = skipped
    with request.recording(
        plan, device=device, source=f"{SUITE}{name}", kind="suite", num_runs=options.repeat
    ) as cases:
        manifest = cases.manifest
        if like is not None:
            manifest.model.config_digest = like.manifest.model.config_digest
            used = sorted({name for name, _ in chosen.values()} - {DEFAULT})
            if used:
                override = Override(name="impl", reference=DEFAULT, used=", ".join(used))
                manifest.overrides = [override]
        digests: list[tuple[str, str]] = []  # of the inputs
        for number, work in enumerate(works):
            progress("suite", number, len(works), work.path)
            digests += _record(cases, work, chosen[work.operator.full_name][1], device)
        cases.done(progress, num_written=cases.order, what="operator")
        manifest.model.digest = digest_many(digests)
    return Run.open(request.out)


def _record(
    cases: CaseWriter, work: CaseWork, function: Callable[..., Any], device: str
) -> list[tuple[str, str]]:
    """Run a case as often as the manifest says, to see whether it repeats itself, and write it; the
    digests of its inputs by name."""
    name, arguments, determinism = work.operator.full_name, work.load(), cases.determinism

    def results() -> tuple[torch.Tensor, ...]:
        """Run it on the CPU. A vendor's kernel may write to its inputs, so it gets copies."""
        if cases.manifest.like is not None:  # a run chose them: torch's own sees them first
            with torch.no_grad(), Checking():
                work.operator.run(**_copied(arguments, "cpu"))
        there = _copied(arguments, device)
        before = determinism.num_fallbacks
        with torch.no_grad():
            made = outputs_of(function(**there))
        if determinism.num_fallbacks > before:  # nothing that the device computed
            raise Unavailable(f"the CPU ran it in place of {device}")
        return tuple(result.detach().cpu().contiguous() for result in made)

    try:
        outputs, *again = [results() for _ in range(cases.manifest.repeatability.num_runs)]
    except (Unavailable, Unsafe, ImportError, NotImplementedError, *_REFUSED) as error:
        cases.skip(f"{work.operator.name}: {first_line(error, most=160)}")
        return []
    place = operator_path(work.path, name, 1)
    operands: list[Operand] = []
    values: dict[str, Any] = {}
    digests = []
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            values[argument] = value
            continue
        site = join_site(place, f"in.{argument}")
        cases.put(site, value)
        values[argument] = {"tensor": len(operands)}
        operands.append(
            Operand(
                site=site,
                shape=tuple(value.shape),
                dtype=format_of(value.dtype).name,
                stride=None if value.is_contiguous() else tuple(value.stride()),
            )
        )
        digests.append((f"{work.path}.{argument}", digest_tensor(value)))
    call = Call(operator=name, arguments=values, operands=tuple(operands))
    for number, output in enumerate(outputs):
        cases.put(join_site(place, output_port(number)), output, None if number else call)
    for others in again:
        for output, other in zip(outputs, others, strict=True):
            cases.repeated(output, other, work.path)
    return digests


def truth(run: Run, request: CaseRequest) -> Run:
    """Every case by its definition, in float64, on the CPU."""
    skipped: dict[str, int] = {}
    works = _recorded(run, skipped)
    plan = _plan(request, {work.path: "definition" for work in works}, run.manifest.plan.sites)
    plan.skipped_operators = skipped
    source = run.manifest.model.source
    with request.recording(plan, device="cpu", source=source, kind="suite") as cases:
        recorded = run.manifest.model
        cases.manifest.model.config_digest = recorded.config_digest
        cases.manifest.model.digest = recorded.digest
        cases.manifest.settings.compute_dtype = "float64"
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


def plan(name: str, request: CaseRequest) -> list[PlannedSite]:
    """Each case by its first tensor; the bytes are those of all its inputs."""
    planned = []
    for work in _works(name, request, {}):
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


def _works(name: str, request: CaseRequest, skipped: dict[str, int]) -> list[CaseWork]:
    """The cases of the run that is repeated, or of the suite, that are wanted."""
    if request.like is not None:
        works = _recorded(request.like, skipped)
    else:
        works = [
            CaseWork(case_path(operator, case), operator, case.make)
            for operator, case in cases_in(name)
        ]
    chosen = request.chosen({work.path: work for work in works})
    if not chosen:
        raise request.nothing_chosen(
            "divergence capture suite:llm --dry-run lists them: 'rms_norm.*', '*.equal'"
        )
    return chosen


def _recorded(run: Run, skipped: dict[str, int]) -> list[CaseWork]:
    """The cases of a run; of operators that this version does not know, only their number."""
    works = []
    for record in run.records:
        if record.call is None:
            continue
        try:
            operator = find(record.call.operator)
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


def _copied(arguments: Arguments, device: str) -> Arguments:
    """Copies on the device, with the same strides."""
    moved = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            layout = value.shape, value.stride()
            value = torch.empty_strided(*layout, dtype=value.dtype, device=device).copy_(value)
        moved[name] = value
    return moved


def _plan(request: CaseRequest, names: dict[str, str], sites: list[str]) -> Plan:
    """``names``: what runs each case."""
    like = request.like
    return Plan(
        passes=["free" if like is None else "replayed"],
        sites=sites,
        anchored_to=None if like is None else like.manifest.id,
        replayed_pass=None
        if like is None
        else next(record.pass_ for record in like.records if record.call is not None),
        modules={path: ModuleNote(kind=kind, role="inner") for path, kind in names.items()},
    )


# Which operators there are, the suites made of them, and which implementation of each runs.
#
#     --impl flash_attn                     where an operator has one of that name, that one
#     --impl rms_norm=llama                 this operator's
#     --impl rms_norm=my_kernels:rms_norm   a function of the user's, imported by name
#     --impl inductor                       every operator through torch.compile
#
# A user's function takes the operator's arguments by name and returns its results.


def find(name: str) -> Operator:
    """The operator called ``name`` (``suite.rms_norm``). Raises UsageError with near names."""
    operator = OPERATORS.get(name)
    if operator is None:
        raise UsageError(
            f"no operator of a suite is called {name!r}",
            hint=did_you_mean(name, OPERATORS) or f"one of {', '.join(OPERATORS)}",
        )
    return operator


def cases_in(suite: str) -> Iterator[tuple[Operator, OperatorCase]]:
    """Every case of a suite, in order."""
    for operator in OPERATORS.values():
        for case in operator.cases():
            if suite == "llm" or case.quick:
                yield operator, case


def case_path(operator: Operator, case: OperatorCase) -> str:
    """Return a case's path in its sites: ``rms_norm.bfloat16.decode.outliers``."""
    return f"{operator.full_name.removeprefix(PREFIX)}.{case.name}"


DEFAULT = "torch"
COMPILED = "inductor"
PACKAGES = {
    "torch_npu": "torch_npu",
    "vllm": "vllm._custom_ops",
    "triton": "liger_kernel",
    "flash_attn": "flash_attn",
}
"""What the implementations of a name need beside torch."""


Chosen = dict[str, tuple[str, Callable[..., Any]]]
"""By an operator's full name, what runs: its name as it is recorded, and itself."""


def choose(wishes: Implementations) -> Chosen:
    """What runs for every operator. ``wishes``: ``--impl`` values, or functions by operator name.
    Raises UsageError, which names what there is."""
    chosen: Chosen = {name: (DEFAULT, operator.run) for name, operator in OPERATORS.items()}
    for where, what in pairs_of(wishes):
        if not where:  # wherever there is one of that name
            having = [operator for operator in OPERATORS.values() if what in _ways(operator)]
            if not having:
                hint = _known()
                raise UsageError(f"no operator has an implementation called {what!r}", hint=hint)
            chosen |= {} if what == DEFAULT else _loaded(what, having)
            continue
        operator = find(where if where.startswith(PREFIX) else PREFIX + where)
        if not isinstance(what, str):
            chosen[operator.full_name] = label_of(what), what
        elif ":" in what:
            chosen[operator.full_name] = what, function_named(what, operator.name)
        elif what in _ways(operator):
            chosen |= _loaded(what, [operator])
        else:
            raise UsageError(
                f"{operator.name} has no implementation called {what!r}",
                hint=f"it has {', '.join(_ways(operator))}; or your own: "
                f"{operator.name}=MODULE:FUNCTION",
            )
    return chosen


def _ways(operator: Operator) -> list[str]:
    """Return what can run it, by name."""
    return [DEFAULT, COMPILED, *operator.implementations]


def _loaded(name: str, operators: Sequence[Operator]) -> Chosen:
    """The implementation of that name. Raises UsageError where its package is not here."""
    try:
        importlib.import_module(PACKAGES.get(name, DEFAULT))
    except (ImportError, OSError) as error:
        raise UsageError(f"{name} is not here: {error}", hint=_known()) from error
    loaded: Chosen = {}
    for operator in operators:
        call = {DEFAULT: operator.run, **operator.implementations}.get(name)
        if call is None:
            call = partial(torch.compile(operator.run, dynamic=False))
        loaded[operator.full_name] = name, call
    return loaded


def _known() -> str:
    """Return what could be asked for here."""
    rows = [DEFAULT, COMPILED]
    for name in sorted({name for item in OPERATORS.values() for name in item.implementations}):
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module(PACKAGES.get(name, DEFAULT))
            having = [item.name for item in OPERATORS.values() if name in item.implementations]
            rows.append(f"{name} ({', '.join(having)})")
    return "here are: " + "; ".join(rows)
