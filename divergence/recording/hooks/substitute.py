"""Substitutes: another run's result put in place of an operator's, to see what then becomes fine.

The causal check of a suspicion. If an operator is what makes a side wrong, then with the healthy
side's result in its place everything that follows must be as near to the truth as the healthy
side is; what stays wrong has another cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from divergence.errors import UsageError
from divergence.run.reader import Run
from divergence.run.schema.site import is_operator_site, near_names, one_or_more

if TYPE_CHECKING:
    import torch

__all__ = ["Substitute", "parse_substitutes", "substitute_from"]


@dataclass(frozen=True, slots=True)
class Substitute:
    """An operator whose results are replaced by those recorded in another run."""

    run: Run
    """The run that holds the results."""
    site: str
    """The operator's site, with its port."""

    def find(self, pass_: str, sample: int, step: int, port: str) -> torch.Tensor | None:
        """Of the same forward: of the same pass, else of the anchored or the free one."""
        path = self.site.rpartition(":")[0]
        for name in (pass_, "anchored", "free"):
            record = self.run.find((name, sample, step, f"{path}:{port}"))
            if record is not None:
                return self.run.read(record)
        return None

    def __str__(self) -> str:
        return f"{self.site} from {self.run.manifest.id}"


def parse_substitutes(
    given: Mapping[str, str | Path | Run | Substitute] | Sequence[str],
) -> dict[str, Substitute]:
    """By operator path: ``{"model.layers.3.mlp/aten.mul:out": RUN}``; in words ``SITE=RUN``, or
    ``SITE=RUN=OTHER_SITE``.

    Raises UsageError for a site that is no operator's or that the run does not hold, and
    RunFormatError for an unreadable run.
    """
    found: dict[str, Substitute] = {}
    named = given if isinstance(given, Mapping) else dict(map(_parted, one_or_more(given)))
    for site, source in named.items():
        if not is_operator_site(site) or ":out" not in site:
            raise UsageError(
                f"{site!r} is no operator's result, so nothing can be put in its place",
                hint="for example --substitute model.layers.3.mlp/aten.mul:out=RUN",
            )
        if not isinstance(source, Substitute):
            source = _opened(site, source)
        held = {record.site for record in source.run.records}
        if source.site not in held:
            near = near_names(source.site, held)
            raise UsageError(
                f"{source.run.path} holds no {source.site}",
                hint=f"did you mean {', '.join(near)}?" if near else "capture it with --sites ops@",
            )
        found[site.rpartition(":")[0]] = source
    return found


def _parted(word: str) -> tuple[str, str]:
    site, equals, run = word.partition("=")
    if not (site and equals and run):
        raise UsageError(
            f"--substitute {word!r}: there is no RUN after a =",
            hint="for example --substitute model.layers.3.mlp/aten.mul:out=RUN",
        )
    return site, run


def _opened(site: str, source: str | Path | Run) -> Substitute:
    """``RUN``, or ``RUN=SITE`` where the operator has another site there."""
    if isinstance(source, Run):
        return Substitute(source, site)
    path, _, other = str(source).rpartition("=")
    if path and is_operator_site(other) and ":out" in other:
        return Substitute(Run.open(path), other)
    return Substitute(Run.open(source), site)


def substitute_from(
    substitutes: Mapping[str, Substitute],
) -> Callable[[str, int, int, str], torch.Tensor | None]:
    """``(pass, sample, step, site)`` → the tensor to put there, or None."""

    def substitute(pass_: str, sample: int, step: int, site: str) -> torch.Tensor | None:
        path, _, port = site.rpartition(":")
        found = substitutes.get(path)
        return None if found is None else found.find(pass_, sample, step, port)

    return substitute
