"""A selection says what of a forward is recorded: which sites, steps and token positions.

Sites are chosen by built-in words, presets, globs and regular expressions:

``blocks``   what one forward passes through once, in order: every block and every
             trunk module (embedding, rotary table, final norm, head), their
             floating-point inputs and outputs; masks are left out (their size is
             tokens², and they are an input, not a result). Of blocks with experts also which
             token goes to which (model.structure).
``modules``  every module's inputs and outputs.
``ops@PATH``  every operator called inside the modules that PATH (a path or glob) names, and
             those modules' own inputs and outputs.
Anything else is a preset in configs/ (``attention`` → sites-attention.toml) or a
pattern on site names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

import torch

from divergence.config import expand_sites
from divergence.errors import UsageError
from divergence.recording.structure import is_routing, routing_modules
from divergence.run.manifest import ModuleNote, StoreMode
from divergence.run.reader import Run
from divergence.run.site import (
    BUILTIN_SITES,
    ROOT,
    compile_patterns,
    did_you_mean,
    is_codes,
    is_operator_site,
    join_site,
    module_of,
)

OPERATORS = "ops@"
"""Before a module's path: every operator inside it."""


class SiteSelection:
    """``wanted(path, port, tensor)`` and the set of modules that need a hook. Raises UsageError for
    a pattern that no module of this model can satisfy.

    ``recorded``: where the sites are those of a run that is repeated, the sites that it holds. They
    stand for its regular expressions, which may be anything, and are not matched."""

    def __init__(
        self,
        sites: Sequence[str],
        notes: Mapping[str, ModuleNote],
        *,
        recorded: Collection[str] | None = None,
    ) -> None:
        self.sites = expand_sites(sites or ["blocks"])
        self._notes = notes
        self._modules = "modules" in self.sites
        self._blocks = "blocks" in self.sites
        operators = [site for site in self.sites if site.startswith(OPERATORS)]
        globs = [site.removeprefix(OPERATORS).rstrip(":") for site in operators]
        for glob in globs:
            _check(glob, notes)
        named = compile_patterns([f"{glob}:*" for glob in globs])
        inner = {path for path in notes if named(f"{path}:")}
        # the outermost of them: what is called inside is recorded
        self.operators = {
            path for path in inner if not any(path.startswith(f"{outer}.") for outer in inner)
        }
        patterns = [site for site in self.sites if site not in (*BUILTIN_SITES, *operators)]
        self._held = set[str]()
        if recorded is not None and any(pattern.startswith("re:") for pattern in patterns):
            modules = (site for site in recorded if not is_operator_site(site))
            self._held = {join_site(module_of(s), s.rpartition(":")[2]) for s in modules}
            patterns = [pattern for pattern in patterns if not pattern.startswith("re:")]
        for pattern in patterns:
            _check(pattern, notes)
        self._match = compile_patterns(patterns)
        self._known: dict[tuple[str, str], bool] = {}
        self._routing = routing_modules(notes)
        everything = self._modules or any(pattern.startswith("re:") for pattern in patterns)
        heads = compile_patterns([_path_part(pattern) + ":*" for pattern in patterns])
        recorded_paths = set(map(module_of, self._held))
        self.hooked = {
            path
            for path, note in notes.items()
            if everything
            or (self._blocks and note.role != "inner")
            or path in self.operators
            or (self._blocks and path in self._routing)
            or path in recorded_paths
            or heads(f"{path}:")
        }

    def wanted(self, path: str, port: str, tensor: torch.Tensor) -> bool:
        """Is this tensor to be recorded?"""
        key = (path, port)
        chosen = self._known.get(key)
        if chosen is None:
            trunk = self._blocks and self._notes[path].role != "inner"
            # An integer or a mask is no result of a block; `modules` and patterns still get it.
            plain = tensor.is_floating_point() and "mask" not in port
            chosen = (
                self._modules
                or (plain and trunk and (path != ROOT or port == "out"))
                or (plain and path in self.operators)
                or (self._blocks and (is_codes(port) or self.is_routing(path, port, tensor)))
                or (site := join_site(path, port)) in self._held
                or self._match(site)
            )
            self._known[key] = chosen
        return chosen

    def is_routing(self, path: str, port: str, tensor: torch.Tensor) -> bool:
        """Does it tell which token goes to which expert? Then its rows are all prompts' tokens."""
        return is_routing(self._routing.get(path), port, tensor)


def _path_part(pattern: str) -> str:
    return pattern.rpartition(":")[0] if ":" in pattern else pattern


def _check(pattern: str, notes: Mapping[str, ModuleNote]) -> None:
    """A pattern must be able to match a module of this model."""
    if pattern.startswith("re:"):
        test = compile_patterns([pattern])
        ports = ("in", "out", "in.1", "out.1", "in.0", "out.0", "in.hidden_states")
        if any(test(join_site(path, port)) for path in notes for port in ports):
            return
        raise UsageError(
            f"no site of this model matches {pattern!r}",
            hint="a regular expression must match the whole site, for example "
            r"re:model\.layers\.\d+\.mlp:out",
        )
    path = _path_part(pattern)
    test = compile_patterns([path + ":*"])
    if any(test(f"{name}:") for name in notes):
        return
    raise UsageError(
        f"no module of this model matches {pattern!r}",
        hint=did_you_mean(path, notes)
        or "`divergence capture MODEL --sites modules --dry-run` lists every site",
    )


def check_operators(selection: SiteSelection, *, store: StoreMode, only_changed: bool) -> None:
    """Operators are run again from their recorded inputs, which must then be there."""
    if not selection.operators or (store == "full" and not only_changed):
        return
    given = "--only-changed" if only_changed else f"--store {store}"
    raise UsageError(
        f"{given} keeps not all bytes, and operators (ops@) are run again from theirs",
        hint="capture operators in a run of their own, with --store full",
    )


_STORES: tuple[StoreMode, ...] = get_args(StoreMode)


def chosen_store(store: str | None, *, only_changed: bool, like: Run | None) -> StoreMode:
    """The mode: as asked for, else that of the run to be repeated, else ``full``. Raises UsageError
    for a mode that there is none of, and for ``only_changed`` without a run that has digests, or
    with a mode that keeps no bytes anyhow."""
    if store is not None and store not in _STORES:
        raise UsageError(
            f"--store {store}: there are {', '.join(_STORES)}",
            hint=did_you_mean(store, _STORES, count=1) or "full keeps every byte",
        )
    if not only_changed:
        recorded = like.manifest.plan.store if like is not None else "full"
        return recorded if store is None else store
    if like is None:
        raise UsageError(
            "--only-changed needs --like: the run whose bytes need not be stored again",
            hint="divergence capture --like RUN -o OTHER --only-changed",
        )
    if store not in (None, "full"):
        raise UsageError(
            f"--only-changed keeps bytes, and --store {store} keeps none", hint="leave out --store"
        )
    if not any(record.xxh3 or record.fold for record in like.records):
        raise UsageError(
            f"--only-changed: {like.path} holds no digest to tell by what has changed",
            hint="leave out --only-changed",
        )
    return "full"


_RANGE = re.compile(r"(-?[0-9]{1,18})(?:-([0-9]{1,18}))?")
_LAST = re.compile(r"last:([0-9]{1,18})")


def step_selected(spec: str | None, step: int) -> bool:
    """Is ``step`` (0 = prefill) among the selected ones? None selects all. Raises UsageError."""
    if spec is None:
        return True
    for part in _parts(spec, "--steps"):
        if part == "prefill":
            chosen = step == 0
        elif part == "decode":
            chosen = step >= 1
        else:
            low, high = _bounds(part, "--steps")
            if low < 0:
                raise UsageError(
                    f"--steps {spec}: a step counted from the end is not known beforehand",
                    hint="use numbers from 0, for example 0,4-8, or prefill, decode",
                )
            chosen = low <= step <= high
        if chosen:
            return True
    return False


def select_positions(spec: str | None, count: int) -> tuple[int, ...] | None:
    """Selected token indices among ``count``, ascending; None for all. Raises UsageError."""
    if spec is None:
        return None
    chosen: set[int] = set()
    for part in _parts(spec, "--positions"):
        last = _LAST.fullmatch(part)
        if last:
            if int(last[1]) == 0:
                raise UsageError(f"--positions: {part} is no position", hint="for example last:16")
            chosen.update(range(max(0, count - int(last[1])), count))
            continue
        low, high = _bounds(part, "--positions")
        if low < 0:
            low = high = count + low
        chosen.update(range(max(low, 0), min(high, count - 1) + 1) if low >= 0 else ())
    return tuple(sorted(chosen))


def narrowed(
    tensor: torch.Tensor,
    *,
    tokens: int,
    batch: int,
    num_kept: int,
    positions: str | None,
    deciding: bool,
) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The part of a tensor (B, T, ...) that is kept, and the token indices of its rows; None for
    all of them. ``num_kept``: of the last tokens alone, where it is not 0; else ``positions``.
    ``deciding``: it holds logits, or what they are made of, of which the last tokens decide."""
    if tensor.ndim < 2 or tensor.shape[0] != batch:
        return tensor, None
    if tensor.ndim > 3 and tensor.shape[-1] == tensor.shape[-2] == tokens:
        return tensor, None  # attention weights: axis 1 is the heads, however many they are
    few = num_kept + 1  # logits are asked for of the deciding positions alone
    if deciding and tensor.ndim == 3 and tensor.shape[1] in (few, tokens):
        kept = max(num_kept, 1)
        return tensor[:, -kept:, :], tuple(range(tokens - kept, tokens))
    if not (positions or num_kept) or tensor.shape[1] != tokens:
        return tensor, None
    chosen = select_positions(f"last:{num_kept}" if num_kept else positions, tokens)
    assert chosen is not None  # something is chosen
    return tensor[:, list(chosen)], chosen


def _parts(spec: str, option: str) -> list[str]:
    parts = [part.strip() for part in spec.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {spec!r} has an empty part", hint="for example 0,4-8")
    return parts


def _bounds(part: str, option: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(
            f"{option}: {part!r} is neither a number nor a range",
            hint="for example 0,4-8, -1 or last:16"
            if option == "--positions"
            else "for example 0,4-8, prefill or decode",
        )
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if high < low or (low < 0 and match[2]):
        raise UsageError(
            f"{option}: the range {part!r} holds nothing",
            hint="a range is FIRST-LAST from 0, for example 4-8",
        )
    return low, high
