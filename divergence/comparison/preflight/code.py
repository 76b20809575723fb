"""The code that each side ran, and whose code a truth was made by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from divergence.comparison.limits import SHARP
from divergence.comparison.results import PreflightLine
from divergence.facts import Fact, fact, sentence
from divergence.numerics.arrays import wide
from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named
from divergence.run.manifest import CodeNote, Manifest, ModuleNumbers
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import is_operator_site, natural_key, starred
from divergence.words import SIDES

# Whose truth is it? A truth belongs to the code and the weights of the reference.
#
# A float64 run repeats what the code says, so one that was made by faulty code has the fault, and
# blames the side that lacks it. Two things tell whose it is: the digests of the code, where
# manifests hold them (``code.other_code``), and the values.
#
# Two float64 runs of one code agree wherever both hold the same site, pass, sample and step. Sums
# may be added in another order on another machine, so up to ``SHARP`` times the rounding model of
# numerics.floor in float64 is allowed (its inputs are equal only where each block is given them, so
# anchored passes alone are held against each other). ``SHARP``: attention turns a relative error of
# its scores into |s| times as much of its probabilities, and trained models reach |s| of 10 and
# more; 64 allows for some. That is near 1e-13 in small models and 1e-12 in large ones, five orders
# below what float32 rounds. Largest measured between kernel sets of one CPU: 1.4e-15.
#
# What it cannot tell: code that is the same on both machines and wrong.


def disagreement(a: Run, b: Run, *, inside: str | None = None) -> tuple[int, Fact | None]:
    """Hold two float64 runs that are anchored to the same run against each other, ``inside`` one
    block where one is named: (at how many sites and forwards, the first where they differ)."""
    if a.manifest.plan.anchored_to != b.manifest.plan.anchored_to:
        return 0, None
    num_compared, apart = 0, None
    within = ("",) if inside is None else (f"{inside}.", f"{inside}:", f"{inside}#")
    for record in sorted(a.records, key=lambda r: (r.sample, r.step, r.order)):
        if record.pass_ != "anchored" or is_operator_site(record.site):
            continue
        other = b.find(record.coordinates) if record.site.startswith(within) else None
        if other is None or other.positions != record.positions:
            continue
        num_compared += 1
        if apart is None:
            limit = SHARP * floor_of(a.manifest, record, dtype="float64")
            distance = _distance(a, record, b, other)
            if distance > limit:
                apart = fact(
                    "preflight.truths_apart",
                    site=record.site,
                    sample=record.sample,
                    step=record.step,
                    rel_l2=distance,
                    limit=limit,
                )
    return num_compared, apart


def _distance(a: Run, record: Record, b: Run, other: Record) -> float:
    """Relative L2 over what is no pad; 0 where nothing can be said, and infinity where what does
    not round differs, or nan and inf stand at other places."""
    if record.xxh3 is not None and record.xxh3 == other.xxh3:
        return 0.0
    if record.shape != other.shape or record.dtype != other.dtype:
        return math.inf
    if not (a.has_bytes(record) and b.has_bytes(other)):
        return 0.0
    x, y = (
        without_pads(a.manifest, record, wide(run.array(own)))
        for run, own in ((a, record), (b, other))
    )
    if x is None or y is None:
        return 0.0
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(y)):
        return math.inf
    gap, norm = (float(np.linalg.norm(part[finite])) for part in (x - y, x))
    if not gap or not norm or format_named(record.dtype).kind != "float":
        return math.inf if gap else 0.0
    return gap / norm


def without_pads(manifest: Manifest, record: Record, array: np.ndarray) -> np.ndarray | None:
    """The array with the rows of pads set to 0: what stands there is no result (a row that sees
    no key has one value in one kernel and another in the next). None where a batch has pads and
    its axes are not (B, T, ...): which of its rows are pads is not known."""
    pads = None if record.step else manifest.tokens.pads(record.sample)
    if pads is None:
        return array
    if array.shape[:2] != pads.shape:
        return None
    return np.where(pads.reshape(*pads.shape, *[1] * (array.ndim - 2)), 0.0, array)


def floor_of(manifest: Manifest, record: Record, *, dtype: str | None = None) -> float:
    """Return how far two correct results of one code are typically apart at a site, by the rounding
    model of its format, or of ``dtype`` (relative L2); 0 for what does not round."""
    note = manifest.plan.modules.get(record.site.rpartition(":")[0])
    role = "block" if note is None else note.role
    features = record.shape[-1] if record.shape else 1
    form = format_named(dtype or record.dtype)
    return math.hypot(*floor_weights(form, num_features=features, role=role))


# Did both runs run the same code? Class by class of module, from what their manifests say.
#
# Only the code that was recorded is compared: where a run says nothing, nothing is claimed. Which
# attention or which kernel was asked for is a setting, not code, and stands in lines of its own.
# Other versions of a library differ in text almost everywhere: then the classes are counted and the
# versions named, and what was put in place of a class' own code comes first.

_MOST = 3
_PLACEMENT = ("accelerate: AlignDevicesHook", "FSDP", "DDP", "DataParallel", "tensor parallel")
"""Wrappers that say where weights lie: lines of their own tell that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDifference:
    """One class of module that runs other code. ``text``: what differs; ``deliberate``:
    somebody put other code there, it is not a matter of versions. ``places``: modules, with ``*``
    for numbers; ``paths``: those alone that differ, where not all modules of the class do."""

    name: str
    text: Fact
    deliberate: bool
    places: Sequence[str] = ()
    paths: Sequence[str] = ()

    def concerns(self, block: str) -> bool:
        """Does a module of this class lie in ``block``, or is it that?"""
        if self.paths:
            return any(_lies_in(path, block) for path in self.paths)
        # without places, torch's own functions: wherever they are called
        return not self.places or any(_lies_in(place, starred(block)) for place in self.places)


def code_line(a: Manifest, b: Manifest) -> PreflightLine:
    """The line of preflight: what differs most tellingly first."""
    code_a, code_b = a.model.code, b.model.code
    shown = [
        fact("preflight.num_classes", num=len(code))
        if code_a and code_b
        else fact("preflight.recorded", recorded=bool(code))
        for code in (code_a, code_b)
    ]
    details = []
    if differences := code_differences(a, b):
        texts = difference_texts(differences, a, b)
        details = [fact("preflight.code_differences", differences=texts)]
    return PreflightLine(
        check="code",
        status="differs" if details else "same",
        reference=sentence(shown[0]),
        candidate=sentence(shown[1]),
        details=details,
    )


def difference_texts(differences: Sequence[CodeDifference], a: Manifest, b: Manifest) -> list[Fact]:
    """Return what was replaced, one by one, then the differences of code together."""
    texts = [difference.text for difference in differences if difference.deliberate]
    plain = [difference for difference in differences if not difference.deliberate]
    return [*texts, _counted(plain, a, b)] if plain else texts


def code_differences(a: Manifest, b: Manifest) -> list[CodeDifference]:
    """Every class of module that does not run the same code in both runs, what was replaced first;
    empty where a run does not say."""
    code_a, code_b = a.model.code, b.model.code
    if not code_a or not code_b:
        return []
    differences: list[CodeDifference] = []
    for name in code_a:
        if name in code_b:
            differences += _class_differences(name, code_a[name], code_b[name])
    for side, digests, others in (("reference", code_a, code_b), ("candidate", code_b, code_a)):
        for name, note in digests.items():
            if name not in others:
                differences.append(_alone(name, note, side, others))
    return sorted(differences, key=lambda difference: not difference.deliberate)


def _class_differences(name: str, a: CodeNote, b: CodeNote) -> list[CodeDifference]:
    places = sorted({*a.places, *b.places})
    differences: list[CodeDifference] = []

    def add(
        code: str, *, deliberate: bool = True, paths: Sequence[str] = (), **values: Any
    ) -> None:
        text = fact(f"preflight.{code}", **values)
        differences.append(
            CodeDifference(name=name, text=text, deliberate=deliberate, places=places, paths=paths)
        )

    odd = _differing(a, b)
    only_odd = sorted(odd) if a.digest == b.digest else []
    for side, own, other in (("reference", a, b), ("candidate", b, a)):
        for text in own.replaced:
            if text not in other.replaced:
                add("replaced", paths=only_odd, what=text, side=side)
        there = _wrappers(other)
        for text in _wrappers(own):
            if text not in there:
                add("wrapped", name=name, what=text, side=side)
    for key, number in a.attributes.items():
        for (reference, candidate), paths in _other_numbers(number, b.attributes.get(key)).items():
            add(
                "attribute",
                name=name,
                key=key,
                reference=reference,
                candidate=candidate,
                paths=paths,
                where=paths[0] if len(paths) == 1 else None,
                num=len(paths) if len(paths) > 1 else None,
            )
    set_a, set_b = a.changed_after, b.changed_after
    if set_a is not None and set_b is not None:  # what changes on both sides counts something
        for key in sorted(
            (set_a.keys() ^ set_b.keys()) & a.attributes.keys() & b.attributes.keys()
        ):
            sample = set_a.get(key, set_b.get(key))
            add("attribute_changed", name=name, key=key, side=SIDES[key in set_b], sample=sample)
    if a.compiled != b.compiled:
        add("compiled", name=name, reference=a.compiled or None, candidate=b.compiled or None)
    if differences:
        return differences
    names = _functions(a, b)
    if a.digest != b.digest or odd or names:
        replaced = a.replaced[0] if a.replaced and b.replaced else None
        add(
            "other_code",
            deliberate=replaced is not None,
            paths=only_odd,
            name=name,
            functions=names[:_MOST] or None,
            where=only_odd[:_MOST],
            replaced=replaced,
        )
    return differences


def _other_numbers(
    a: str | ModuleNumbers, b: str | ModuleNumbers | None
) -> dict[tuple[str, str], list[str]]:
    """Each pair of values that A's and B's modules hold, where they differ → the modules where they
    do; none named where most or all do."""
    if b is None or a == b:
        return {}
    if isinstance(a, str) and isinstance(b, str):
        return {(a, b): []}
    if any(isinstance(number, str) and "; " in number for number in (a, b)):
        return {}  # of an earlier version: which modules it means stands in a text
    size = next(number.num_modules for number in (a, b) if isinstance(number, ModuleNumbers))
    first, second = (
        ModuleNumbers(value=number, num_modules=size, others={})
        if isinstance(number, str)
        else number
        for number in (a, b)
    )
    named = {path for side in (first, second) for paths in side.others.values() for path in paths}
    differing: dict[tuple[str, str], list[str]] = {}
    if len(named) < size:
        differing[first.value, second.value] = []
    for path in sorted(named, key=natural_key):
        paths = differing.setdefault((first.at(path), second.at(path)), [])
        if len(paths) or (first.value, second.value) != (first.at(path), second.at(path)):
            paths.append(path)
    return {values: paths for values, paths in differing.items() if values[0] != values[1]}


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


def _wrappers(note: CodeNote) -> list[str]:
    return [text for text in note.wrapped if not text.startswith(_PLACEMENT)]


def _alone(name: str, note: CodeNote, side: str, others: dict[str, CodeNote]) -> CodeDifference:
    """A class that one side alone has; what stands at its places on the other side is named."""
    if note.replaced and not note.places:  # of torch: its functions and kernels
        return CodeDifference(
            name=name,
            deliberate=True,
            text=fact("preflight.replaced_of_torch", what=note.replaced[:_MOST], side=side),
        )
    there = [other for other, code in others.items() if set(code.places) & set(note.places)]
    return CodeDifference(
        name=name,
        text=fact(
            "preflight.class_alone",
            name=name,
            origin=note.origin,
            side=side,
            instead=there[:_MOST],
            how=[*note.replaced, *_wrappers(note)] if note.replaced else [],
        ),
        deliberate=bool(there and side == "candidate") or bool(note.replaced),
        places=note.places,
    )


def _counted(differences: Sequence[CodeDifference], a: Manifest, b: Manifest) -> Fact:
    """Differences of text: the first few, or how many where versions explain them."""
    versions = [
        fact(
            "preflight.version",
            name=name,
            reference=a.environment.versions.get(name, "-"),
            candidate=b.environment.versions.get(name, "-"),
        )
        for name in ("transformers", "torch")
        if a.environment.versions.get(name) != b.environment.versions.get(name)
    ]
    if len(differences) <= _MOST:
        texts = [difference.text for difference in differences]
        return fact("preflight.few_codes", differences=texts, versions=versions)
    names = [difference.name for difference in differences]
    return fact("preflight.many_codes", num=len(names), versions=versions, names=names)


def other_code(a: Manifest, b: Manifest, block: str | None = None) -> list[str]:
    """Classes of modules whose code differs between two runs, of ``block`` where one is given.

    Empty where a run does not say. A class that one run alone has counts where something was
    replaced in it.
    """
    own, other = a.model.code, b.model.code
    if not own or not other:
        return []
    texts: list[str] = []
    for name in sorted({*own, *other}):
        notes = [(code[name], m) for code, m in ((own, a), (other, b)) if name in code]
        here = any(_concerns(note, name, manifest, block) for note, manifest in notes)
        if len(notes) == 1:
            differs = bool(notes[0][0].replaced) and here
        elif own[name].digest != other[name].digest:
            differs = here
        else:
            odd = _differing(own[name], other[name])
            differs = any(_lies_in(path, block) for path in odd)
        if differs:
            texts.append(name)
    return texts


def replaced_in(manifest: Manifest, block: str | None) -> list[str]:
    """Code put in the place of a class' own: of the modules inside ``block``, or of all."""
    texts: list[str] = []
    for name, note in manifest.model.code.items():
        odd = [path for path in note.odd if _lies_in(path, block)]
        if odd or (not note.odd and _concerns(note, name, manifest, block)):
            texts += note.replaced or [f"{name} in {path}" for path in odd]
    return texts


def truth_tells(a: Manifest, b: Manifest, block: str | None) -> bool:
    """May a truth, which has A's code, tell the side? Not where the code differs, unless some was
    replaced on B alone; nor where modules hold other numbers, unless B's other modules hold A's, or
    both configurations do."""
    on_a, on_b = set(replaced_in(a, block)), set(replaced_in(b, block))
    return on_a < on_b or not (other_code(a, b, block) or numbers_in_doubt(a, b, block))


def other_numbers(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """The numbers that modules of ``block`` hold otherwise in the two runs."""
    return [
        difference.text
        for difference in code_differences(a, b)
        if difference.text.code == "preflight.attribute"
        and (block is None or difference.concerns(block))
    ]


def numbers_in_doubt(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Lists the numbers of which it is not known whose are meant: those that are odd on neither
    side, and that no configuration tells."""
    stated = numbers_stated(a, b, block)
    return [item for item in _even_numbers(a, b, block) if item not in stated]


def numbers_stated(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Lists the numbers that B's modules hold against both configurations, which are one: A's value
    stands there, by its name or as what is no 0, 1 or whole number, which stand there for much
    else, or is 1/√ of what does (the scale of attention); and B's does not, nor is it 1/√ of a
    quotient."""
    numbers = _even_numbers(a, b, block)
    if not numbers or a.model.config_digest != b.model.config_digest:
        return []
    config = a.model.config
    sizes = [value for value in config.values() if type(value) is int and value > 1]
    stated = {str(v) for v in config.values() if type(v) is float and abs(v) not in (0.0, 1.0)}
    stated |= {str(value**-0.5) for value in sizes}
    derived = {str(value) for value in config.values()} | stated
    derived |= {str((size / part) ** -0.5) for size in sizes for part in sizes}

    def is_stated(item: Fact) -> bool:
        named = {str(v) for key, v in config.items() if key.rpartition(".")[2] == item["key"]}
        return item["reference"] in stated | named and item["candidate"] not in derived

    return [item for item in numbers if is_stated(item)]


def _even_numbers(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Lists the numbers that differ, but for B's own where its modules hold A's but for some of
    them, and A's hold it all: those are odd on B."""

    def is_odd_on_b(item: Fact) -> bool:
        own = a.model.code[item["name"]].attributes[item["key"]]
        return bool(item["where"] or item["num"]) and (isinstance(own, str) or not own.others)

    numbers = other_numbers(a, b, block)
    if not numbers or a.model.config_digest != b.model.config_digest:
        return numbers
    return [item for item in numbers if not is_odd_on_b(item)]


def _differing(a: CodeNote, b: CodeNote) -> list[str]:
    """Modules that do not run the same code, of two notes on one class."""
    paths = dict.fromkeys((*a.odd, *b.odd))
    return [path for path in paths if a.odd.get(path, a.digest) != b.odd.get(path, b.digest)]


def _lies_in(path: str, block: str | None) -> bool:
    return block is None or path == block or path.startswith(f"{block}.")


def _concerns(note: CodeNote, name: str, manifest: Manifest, block: str | None) -> bool:
    """May a module of this class run in ``block``? Where its places are not recorded, by the
    classes of the recorded modules; functions of torch run everywhere."""
    if block is None or note.origin == "torch":
        return True
    if note.places:
        return any(_lies_in(place, starred(block)) for place in note.places)
    kinds = {
        module.kind.partition("/")[0]
        for path, module in manifest.plan.modules.items()
        if path.startswith(f"{block}.")
    }
    return not kinds or name in kinds or name.rpartition(".")[2] in kinds
