"""What probes write into: facts, and the exact tensors that they rest on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from divergence.errors import first_line
from divergence.run.manifest import ArithmeticFact


class Notebook:
    """Facts in the order in which they were found; ``tensors``: (site, tensor) of a probe run.

    ``keep_tensors`` false, as in the quick form, keeps facts alone.
    """

    def __init__(self, *, keep_tensors: bool = True) -> None:
        self.facts: list[ArithmeticFact] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._keep = keep_tensors

    def note(
        self,
        probe: str,
        subject: str,
        value: str,
        *,
        verified: bool = True,
        unit: str | None = None,
        numbers: dict[str, float] | None = None,
        digest: str | None = None,
        evidence: str | None = None,
    ) -> None:
        """One fact."""
        fact = ArithmeticFact(
            name=f"{probe}: {subject}", value=value, verified=verified, unit=unit,
            numbers=numbers or {}, digest=digest, evidence=evidence,
        )  # fmt: skip
        self.facts.append(fact)

    @contextlib.contextmanager
    def attempt(self, probe: str, subject: str) -> Iterator[None]:
        """A probe that this machine refuses is noted, never fatal."""
        try:
            yield
        except (RuntimeError, TypeError) as error:
            evidence = first_line(error)
            self.note(probe, subject, "no answer", verified=False, evidence=evidence)

    def keep(self, probe: str, subject: str, **ports: torch.Tensor) -> None:
        """Tensors of one probe by port; ``in_x`` becomes the port ``in.x``.

        The path is a module's: an operator's (with a slash) would stand for a call that can be
        run again.
        """
        if not self._keep:
            return
        path = f"probe.{probe}.{subject}".replace(" ", "-").replace("@", "").replace(":", "")
        for port, tensor in ports.items():
            self.tensors.append((f"{path}:{port.replace('_', '.', 1)}", tensor))
