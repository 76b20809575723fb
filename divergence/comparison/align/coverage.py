"""Coverage: what became of every record of both runs.

A verdict is worth what it looked at. Alignment pairs the tensors of the passes that both runs hold;
this module adds what alignment alone does not see: passes, operators and forwards that the
candidate lacks, sites that an anchored pass should have shown and did not, and modules that only
the candidate has. It then counts, pass by pass, what the reference holds and what became of it
(PassCoverage). A record that is none of paired, unmatched, skipped and judged elsewhere would be a
fault of this tool; it is listed as missing, so that it can never pass unseen.

When is a site that only the candidate has a lack of coverage? Not where the candidate was asked to
record more (``--sites``), but where the *reference* was asked to record it too and has no such
module: its ``plan.sites`` select the site, and its ``plan.modules``, every module it had hooks on,
does not hold the module. That is another architecture, an extra block for instance. A module that
both have but that ran on one side alone (an expert that no token was sent to) is none.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from divergence.comparison.align.pairs import (
    Alignment,
    NameMap,
    Piece,
    compared_passes,
    indexed,
    is_given,
    kinds_of,
)
from divergence.comparison.results import (
    OperatorsResult,
    PassCoverage,
    SiteResult,
    Skipped,
    TokensResult,
    Unexercised,
)
from divergence.errors import IncomparableError
from divergence.facts import Fact, apart, fact
from divergence.numerics.formats import format_named
from divergence.run.manifest import ModuleNote
from divergence.run.reader import Run
from divergence.run.record import Coordinates, Record
from divergence.run.site import BUILTIN_SITES, compile_patterns, module_of, starred

_GIVEN = fact("align.given")
_CLOSER = fact("align.closer")
_BY_DIGEST = fact("align.by_digest")
_ALONE = fact("align.whole_alone")
_NOT_WIDENED = fact("align.not_widened")
_NO_ANCHOR = fact("align.no_anchored_operators")
_OTHER_CALLS = fact("align.other_calls")
UNACCOUNTED = fact("align.unaccounted")


@dataclass(slots=True)
class _Row:
    """Counts of one pass under way."""

    pass_: str
    what: Literal["tensors", "operators", "tokens"]
    counts: Counter[str] = field(default_factory=Counter)
    ways: list[Fact] = field(default_factory=list)
    why: Fact | None = None

    def add(self, fate: str, why: Fact | None = None, number: int = 1) -> None:
        self.counts[fate] += number
        if fate == "elsewhere" and why is not None and why not in self.ways:
            self.ways.append(why)
        elif fate in ("missing", "skipped", "extra") and self.why is None:
            self.why = why

    def result(self) -> PassCoverage:
        counts = {f"num_{fate}": number for fate, number in self.counts.items()}
        total = sum(number for fate, number in self.counts.items() if fate != "extra")
        return PassCoverage(
            pass_=self.pass_,
            what=self.what,
            num_reference=total,
            ways=apart(self.ways),
            why=self.why,
            **cast(dict[str, Any], {"num_compared": 0, **counts}),
        )


def account(
    alignment: Alignment,
    a: Run,
    b: Run,
    *,
    rename: NameMap,
    escalated: Sequence[SiteResult] = (),
    operators: OperatorsResult | None = None,
) -> tuple[Alignment, list[PassCoverage]]:
    """The alignment with all that has no partner, and the coverage by pass.

    ``escalated``: what compare_escalated measured. ``operators``: those that were compared.
    Raises IncomparableError where all that was paired holds no element.
    """
    empty = sum(_is_empty(pair.reference, pair.candidate) for pair in alignment.pairs)
    if alignment.pairs and empty == len(alignment.pairs) and operators is None:
        raise IncomparableError(
            f"nothing was compared: none of the {empty} tensors in common has an element",
            where=f"{a.path} and {b.path}",
            hint="capture other sites, or a prompt that has tokens",
        )
    ledger = _Ledger(alignment, a, b, rename, escalated, operators)
    ledger.tensors()
    ledger.reference_alone()
    ledger.operators()
    ledger.candidate_alone()
    rows = [row.result() for row in ledger.rows.values() if row.counts]
    done = replace(alignment, only_reference=[*alignment.only_reference, *ledger.missing])
    return done, rows


def tokens_row(tokens: TokensResult | None) -> list[PassCoverage]:
    """The generated tokens as one more row: nothing where the reference generated none."""
    if tokens is None or not tokens.num_reference:
        return []
    row = _Row("free", "tokens")
    row.add("compared", number=tokens.num_tokens - tokens.num_other_text)
    if tokens.num_missing:
        row.add("missing", fact("align.fewer_tokens"), tokens.num_missing)
    rest = tokens.num_reference - sum(row.counts.values())
    if rest > 0:
        row.add("elsewhere", fact("align.other_text"), rest)
    return [row.result()]


def _is_empty(piece: Piece, other: Piece) -> bool:
    return piece.record.numel == 0 and other.record.numel == 0


class _Ledger:
    """Fills the rows, and lists what is missing."""

    def __init__(
        self,
        alignment: Alignment,
        a: Run,
        b: Run,
        rename: NameMap,
        escalated: Sequence[SiteResult],
        operators: OperatorsResult | None,
    ) -> None:
        self._alignment, self._a, self._b, self._rename = alignment, a, b, rename
        self._escalated, self._operators = escalated, operators
        self._replays = any(run.manifest.plan.replayed_pass is not None for run in (a, b))
        self._split = a.manifest.tokens.layout != b.manifest.tokens.layout
        self._kinds = kinds_of(a), kinds_of(b)
        self._passes = compared_passes(a.manifest, b.manifest, [])
        self.rows: dict[tuple[str, str], _Row] = {}
        self.missing: list[Skipped] = []

    def _row(self, pass_: str, what: Literal["tensors", "operators"]) -> _Row:
        return self.rows.setdefault((pass_, what), _Row(pass_, what))

    def _lack(self, row: _Row, place: Coordinates, reason: Fact) -> None:
        """A record of the reference that nothing was held against."""
        row.add("missing", reason)
        self.missing.append(Skipped(*place, "reference", reason))

    @functools.cached_property
    def _theirs(self) -> Mapping[Coordinates, Piece]:
        """The candidate's, asked for where the reference's are not all paired."""
        return {} if self._replays else indexed(self._b, split=self._split)

    @functools.cached_property
    def _forwards(self) -> set[tuple[str, int, int]]:
        return {key[:3] for key in self._theirs}

    def tensors(self) -> None:
        """Tensors of modules in the passes that are compared one by one."""
        pieces = {} if self._replays else indexed(self._a, split=self._split)
        paired = {_key(pair.pass_, pair.reference): pair for pair in self._alignment.pairs}
        alone = {_key_of(item): item for item in self._alignment.only_reference}
        skipped = {
            _key_of(item): item for item in self._alignment.skipped if item.side != "candidate"
        }
        for label, ours_in, theirs_in in self._passes:
            row = self._row(label, "tensors")
            again = (ours_in, theirs_in) == ("free", "anchored")
            num_paired = num_empty = 0
            for found_in, sample, step, site in pieces:
                if found_in != ours_in:
                    continue
                key = (label, sample, step, site)
                if (pair := paired.pop(key, None)) is not None:
                    is_empty = _is_empty(pair.reference, pair.candidate)
                    num_empty, num_paired = num_empty + is_empty, num_paired + 1
                elif again and (theirs_in, sample, step) not in self._forwards:
                    continue  # no anchor reached it: judged in the free pass
                elif key in alone:
                    row.add("missing", alone[key].why)
                elif key in skipped:
                    row.add("skipped", skipped.pop(key).why)
                elif theirs_in == "anchored" and is_given(self._a.manifest, site):
                    row.add("elsewhere", _GIVEN)
                else:
                    is_partner = (theirs_in, sample, step, self._rename(site)) in self._theirs
                    absent = fact("align.not_in_pass", pass_=theirs_in)
                    self._lack(row, key, UNACCOUNTED if is_partner else absent)
            if num_empty:
                row.add("empty", number=num_empty)
            if num_paired > num_empty:
                row.add("compared", number=num_paired - num_empty)
        for item in skipped.values():  # parts of ranks that make no tensor
            if item.side == "reference":
                self._row(item.pass_, "tensors").add("skipped", item.why)

    def reference_alone(self) -> None:
        """Passes of the reference that are not compared tensor by tensor, and its weights."""
        a, b = self._a.manifest, self._b.manifest
        compared = {ours for _, ours, _ in self._passes}
        judged = {(s.sample, s.step, s.site) for s in self._escalated if s.of != "candidate"}
        whole = {r.coordinates for r in self._b.records if r.pass_ == "whole"}
        for record in self._a.records:
            kind = self._kinds[0](record)
            pass_, sample, step, site = record.coordinates
            if kind in ("operator", "truth") or (
                kind == "tensor" and pass_ in compared and not self._replays
            ):
                continue
            row = self._row(pass_, "tensors")
            if kind == "weight":
                row.add("elsewhere", _BY_DIGEST)
            elif self._replays:
                row.add("missing", fact("align.replay_has_operators_alone"))
            elif kind == "whole":
                if ("whole", sample, step, self._rename(site)) in whole:
                    row.add("elsewhere", _ALONE)
                else:
                    self._lack(row, record.coordinates, fact("align.no_whole_pass"))
            elif pass_ == "escalated":
                if {(sample, step, site), (sample, step, self._rename(site))} & judged:
                    row.add("compared")
                elif format_named(record.dtype).kind != "float":
                    row.add("elsewhere", _NOT_WIDENED)
                elif "escalated" in b.plan.passes:
                    self._lack(row, record.coordinates, fact("align.other_escalated_inputs"))
                else:
                    reason = fact("align.no_such_pass", pass_=pass_, other_inputs=False)
                    self._lack(row, record.coordinates, reason)
            elif b.plan.anchored_to == a.id:
                row.add("elsewhere", _CLOSER)
            else:
                other_inputs = pass_ in b.plan.passes
                reason = fact("align.no_such_pass", pass_=pass_, other_inputs=other_inputs)
                self._lack(row, record.coordinates, reason)

    def operators(self) -> None:
        """Counts operators by module and forward: the calls may differ (calls.match)."""
        lone = set()
        if self._operators is not None:
            lone = {call.site for call in self._operators.unmatched if call.side == "reference"}
        ours = [r for r in self._a.records if self._kinds[0](r) == "operator"]
        if not ours:
            return
        a, b = self._a.manifest, self._b.manifest
        callers = {
            (r.pass_, r.sample, r.step, _caller(r))
            for r in self._b.records
            if self._kinds[1](r) == "operator"
        }
        partners = {pass_a: other for label, pass_a, other in self._passes if label == "anchored"}
        if a.escalated_to is not None and a.escalated_to == b.escalated_to:
            partners["escalated"] = "escalated"
        for record in ours:
            row = self._row(record.pass_, "operators")
            other = partners.get(record.pass_)
            caller = self._rename(f"{_caller(record)}:out").rpartition(":")[0]
            if other is None and record.pass_ in ("anchored", "free") and "free" in partners:
                row.add("elsewhere", _CLOSER)
            elif other is None and record.pass_ == "free" and self._operators is not None:
                row.add("elsewhere", fact("align.in_anchored_pass"))
            elif other is None:
                self._lack(row, record.coordinates, _NO_ANCHOR)
            elif (other, record.sample, record.step, caller) not in callers:
                reason = fact("align.no_operator_of", module=caller, pass_=other)
                self._lack(row, record.coordinates, reason)
            elif self._operators is None:
                self._lack(row, record.coordinates, fact("align.operators_not_compared"))
            else:
                own = record.site.rpartition(":")[0] in lone
                row.add("elsewhere" if own else "compared", _OTHER_CALLS)

    def candidate_alone(self) -> None:
        """Sites of modules that the reference has not, though it was asked to record them."""
        a, b = self._a.manifest, self._b.manifest
        if not a.plan.modules or a.mesh is not None or b.mesh is not None:
            return  # a rank hooks what it has
        ours = {self._rename(f"{path}:out").rpartition(":")[0] for path in a.plan.modules}
        selects = _selects(a.plan.sites, b.plan.sites)
        for item in self._alignment.only_candidate:
            path = module_of(item.site)
            note = b.plan.modules.get(path)
            if note is None or path in ours or item.pass_ not in ("free", "anchored"):
                continue
            if selects(path, note):
                why = fact("align.no_such_module", module=path)
                self._row(item.pass_, "tensors").add("extra", why)


def _selects(sites: Sequence[str], others: Sequence[str]) -> Callable[[str, ModuleNote], bool]:
    """Would a capture with these sites record something of a module, which one with ``others``
    has recorded? A run's regular expressions may be anything: what one selected on the other side
    it is taken to select here, and else to select nothing."""
    again = set(others) <= set(sites) and any(site.startswith("re:") for site in others)
    patterns = [
        site for site in sites if site not in BUILTIN_SITES and not site.startswith(("ops@", "re:"))
    ]
    match = compile_patterns([pattern.rpartition(":")[0] or pattern for pattern in patterns])

    def selects(path: str, note: ModuleNote) -> bool:
        trunk = "blocks" in sites and note.role in ("block", "trunk")
        if again or "modules" in sites or trunk:
            return True
        return any(match(f"{path}:{port}") for port in ("out", "in"))

    return selects


def _caller(record: Record) -> str:
    return record.site.rpartition(":")[0].rpartition("/")[0]


def _key(pass_: str, piece: Piece) -> Coordinates:
    return (pass_, piece.sample, piece.record.step, piece.record.site)


def _key_of(item: Skipped) -> Coordinates:
    return (item.pass_, item.sample, item.step, item.site)


_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_TOWERS = ("vision", "audio")


def not_exercised(run: Run) -> list[Unexercised]:
    """Lists what no forward of a run used: modules, the largest share of the parameters first,
    experts by block, where the choice and the router's logits were recorded, and windows."""
    plan, config, tokens = run.manifest.plan, run.manifest.model.config, run.manifest.tokens
    total = max(1, run.manifest.model.num_parameters)
    shares: dict[str, int] = {}
    for path, count in plan.not_called.items():
        shares[starred(path)] = shares.get(starred(path), 0) + count
    unreached = [
        Unexercised(what="module", name=name, share=count / total)
        for name, count in sorted(shares.items(), key=lambda item: -item[1])
    ]
    if any(note.routed for note in plan.modules.values()):
        from divergence.comparison.experts import choices_in

        seen: dict[str, set[int]] = {}
        num_experts: dict[str, int] = {}
        for key, records in choices_in(run).items():
            block = str(key[-1])
            for record in records:
                if len(key) == 5:
                    num_experts[block] = record.shape[-1]
                elif run.has_bytes(record):
                    seen.setdefault(block, set()).update(run.array(record).reshape(-1).tolist())
        for block, experts in seen.items():
            num, rest = num_experts.get(block, 0), num_experts.get(block, 0) - len(experts)
            if rest > 0:
                unreached.append(Unexercised(what="experts", name=block, size=rest, of=num))
    longest = max((len(s.prompt_ids) + len(s.generated_ids) for s in tokens.samples), default=0)
    for name, size in config.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf not in _WINDOWS or isinstance(size, bool) or not isinstance(size, int):
            continue
        if prefix.partition("_config")[0] in _TOWERS:  # of patches or frames, not of tokens
            continue
        used = config.get(f"{prefix}.use_{leaf}".lstrip("."), True)
        if used and size > 0 and longest and longest <= size:
            unreached.append(Unexercised(what="window", name=name, size=size, of=longest))
    return unreached
