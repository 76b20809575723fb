"""Did both runs run the same code? Class by class of module, from what their manifests say.

Only the code that was recorded is compared: where a run says nothing, nothing is claimed. Which
attention or which kernel was asked for is a setting, not code, and stands in lines of its own.
Other versions of a library differ in text almost everywhere: then the classes are counted and the
versions named, and what was put in place of a class' own code comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from divergence.comparison.results.findings import Evidence
from divergence.comparison.results.preflight import PreflightLine
from divergence.run.schema.manifest import CodeNote, Manifest
from divergence.run.schema.site import starred

__all__ = ["CodeDifference", "code_differences", "code_evidence", "code_line"]

_MOST = 3
_PLACEMENT = ("accelerate: AlignDevicesHook", "FSDP", "DDP", "DataParallel", "tensor parallel")
"""Wrappers that say where weights lie: lines of their own tell that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDifference:
    """One class of module that runs other code. ``text``: what differs, in words; ``deliberate``:
    somebody put other code there, it is not a matter of versions. ``places``: modules, with ``*``
    for numbers; ``paths``: those alone that differ, where not all modules of the class do."""

    name: str
    text: str
    deliberate: bool
    places: Sequence[str] = ()
    paths: Sequence[str] = ()

    def concerns(self, block: str) -> bool:
        """Does a module of this class lie in ``block``, or is it that?"""
        if self.paths:
            return any(path == block or path.startswith(f"{block}.") for path in self.paths)
        if not self.places:
            return True  # torch's own functions: wherever they are called
        inside = starred(block)
        return any(one == inside or one.startswith(f"{inside}.") for one in self.places)


def code_line(a: Manifest, b: Manifest) -> PreflightLine:
    """The line of preflight: what differs most tellingly first."""
    one, two = a.model.code, b.model.code
    if not one or not two:
        said = ["recorded" if code else "not recorded" for code in (one, two)]
        return PreflightLine(check="code", status="same", reference=said[0], candidate=said[1])
    found = code_differences(a, b)
    shown = [f"{len(code)} classes of module" for code in (one, two)]
    if not found:
        return PreflightLine(check="code", status="same", reference=shown[0], candidate=shown[1])
    texts = [difference.text for difference in found if difference.deliberate]
    plain = [difference for difference in found if not difference.deliberate]
    if plain:
        texts.append(_counted(plain, a, b))
    more = len(texts) - _MOST
    return PreflightLine(
        check="code", status="differs", reference=shown[0], candidate=shown[1],
        detail="; ".join(texts[:_MOST]) + (f"; and {more} more" if more > 0 else ""),
    )  # fmt: skip


def code_evidence(a: Manifest, b: Manifest, block: str | None) -> list[Evidence]:
    """What to know of a verdict whose onset lies in ``block``: does it run other code there?

    Nothing where the code is the same, or was not recorded. Without a block what was replaced
    anywhere is said.
    """
    found = code_differences(a, b)
    if block is None:
        return [Evidence(text=f"other code: {one.text}") for one in found if one.deliberate][:_MOST]
    here = [one for one in found if one.concerns(block)]
    texts = [one.text for one in here if one.deliberate]
    plain = [one for one in here if not one.deliberate]
    if plain:
        texts.append(_counted(plain, a, b))
    if not texts:
        return []
    return [Evidence(text=f"the onset's block runs other code: {text}") for text in texts[:_MOST]]


def code_differences(a: Manifest, b: Manifest) -> list[CodeDifference]:
    """Every class of module that does not run the same code in both runs, what was replaced first;
    empty where a run does not say."""
    one, two = a.model.code, b.model.code
    if not one or not two:
        return []
    found: list[CodeDifference] = []
    for name in one:
        if name in two:
            found += _of_class(name, one[name], two[name])
    for side, mine, others in (("reference", one, two), ("candidate", two, one)):
        for name, note in mine.items():
            if name not in others:
                found.append(_alone(name, note, side, others))
    return sorted(found, key=lambda one: not one.deliberate)


def _of_class(name: str, a: CodeNote, b: CodeNote) -> list[CodeDifference]:
    places = sorted({*a.places, *b.places})
    found: list[CodeDifference] = []

    def add(text: str, *, deliberate: bool, paths: Sequence[str] = ()) -> None:
        found.append(
            CodeDifference(
                name=name, text=text, deliberate=deliberate, places=places, paths=paths
            )
        )  # fmt: skip

    odd = [path for path in {**a.odd, **b.odd} if a.odd.get(path) != b.odd.get(path)]
    only_odd = sorted(odd) if a.digest == b.digest else []
    for side, mine, other in (("reference", a, b), ("candidate", b, a)):
        for text in mine.replaced:
            if text not in other.replaced:
                add(f"{text} on the {side}", deliberate=True, paths=only_odd)
        told, there = _wrappers(mine), _wrappers(other)
        for text in told:
            if text not in there:
                add(f"{name}: {text}, on the {side}", deliberate=True)
    for key in a.attributes:
        if key in b.attributes and a.attributes[key] != b.attributes[key]:
            add(f"{name}.{key} {a.attributes[key]} / {b.attributes[key]}", deliberate=True)
    if a.compiled != b.compiled:
        said = [one or "not compiled" for one in (a.compiled, b.compiled)]
        add(
            f"{name}: {said[0]} on the reference, {said[1]} on the candidate", deliberate=True
        )  # fmt: skip
    if found:
        return found
    names = _functions(a, b)
    if a.digest != b.digest or odd or names:
        which = ", ".join(names[:_MOST]) or "forward"
        where = f" in {', '.join(only_odd[:_MOST])}" if only_odd else ""
        by = _replaced_in_both(a, b)
        add(f"{name}: other code of {which}{where}{by}", deliberate=bool(by), paths=only_odd)
    return found


def _functions(a: CodeNote, b: CodeNote) -> list[str]:
    """Functions whose code differs; those that one side alone has count where they are no choice
    among implementations."""
    names = [*a.functions, *(name for name in b.functions if name not in a.functions)]
    return [
        name
        for name in names
        if a.functions.get(name) != b.functions.get(name)
        and not (name.endswith("]") and (name not in a.functions or name not in b.functions))
    ]


def _replaced_in_both(a: CodeNote, b: CodeNote) -> str:
    return f" (replaced in both: {a.replaced[0]})" if a.replaced and b.replaced else ""


def _wrappers(note: CodeNote) -> list[str]:
    return [text for text in note.wrapped if not text.startswith(_PLACEMENT)]


def _alone(name: str, note: CodeNote, side: str, others: dict[str, CodeNote]) -> CodeDifference:
    """A class that one side alone has; what stands at its places on the other side is named."""
    if note.replaced and not note.places:  # of torch: its functions and kernels
        return CodeDifference(
            name=name, text=f"{'; '.join(note.replaced[:_MOST])} on the {side}", deliberate=True
        )  # fmt: skip
    there = [other for other, one in others.items() if set(one.places) & set(note.places)]
    instead = f" in place of {', '.join(there[:_MOST])}" if there else ""
    how = f" ({'; '.join([*note.replaced, *_wrappers(note)])})" if note.replaced else ""
    return CodeDifference(
        name=name,
        text=f"{name} ({note.origin}) only on the {side}{instead}{how}",
        deliberate=bool(there and side == "candidate") or bool(note.replaced),
        places=note.places,
    )


def _counted(found: Sequence[CodeDifference], a: Manifest, b: Manifest) -> str:
    """Differences of text: the first few, or how many where versions explain them."""
    versions = [
        f"{name} {a.environment.versions.get(name, '-')} / {b.environment.versions.get(name, '-')}"
        for name in ("transformers", "torch")
        if a.environment.versions.get(name) != b.environment.versions.get(name)
    ]
    by = f" ({', '.join(versions)})" if versions else ""
    if len(found) <= _MOST:
        return "; ".join(one.text for one in found) + by
    names = ", ".join(one.name for one in found[:_MOST])
    return f"other code in {len(found)} classes{by}: {names} and {len(found) - _MOST} more"
