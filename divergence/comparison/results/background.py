"""What a page shows beside its report: the two machines, the prompts, and the tokens of both sides.

A report is made to be sent and compared, so it holds none of that; the runs do.
"""

from __future__ import annotations

from dataclasses import dataclass

from divergence.run.manifest import Manifest, SampleTokens

__all__ = ["Background", "Positions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The error of each token of one prompt, block by block, in the pass that counts."""

    sample: int
    tokens: list[str]
    """The prompt's tokens, as text where it is known."""
    blocks: list[str]
    floors: list[list[float | None]]
    """For each block and token ‖a_t - b_t‖ / ‖a_t‖ over the block's floor. None where a side has no
    such number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Both runs' manifests, as far as the runs are still where the report says."""

    reference: Manifest | None = None
    candidate: Manifest | None = None
    positions: Positions | None = None
    notes: tuple[str, ...] = ()
    """What could not be opened, and so is not shown."""

    def text_of(self, token: int) -> str:
        """A token as text, ``#id`` where neither run knows it."""
        for manifest in (self.reference, self.candidate):
            if manifest is not None and str(token) in manifest.tokens.texts:
                return manifest.tokens.texts[str(token)]
        return f"#{token}"

    def samples(self) -> list[tuple[SampleTokens, SampleTokens]]:
        """Each prompt on both sides."""
        if self.reference is None or self.candidate is None:
            return []
        pair = self.reference.tokens.samples, self.candidate.tokens.samples
        return list(zip(*pair, strict=False))
