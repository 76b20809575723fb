"""Pieces of records as tensors: the rows of one sample, its pads, its block's input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from divergence.comparison.align.pairs import Pair, Piece
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.run.schema.record import Record

if TYPE_CHECKING:
    import torch

__all__ = ["Pieces", "same_positions"]


class Pieces:
    """Reads pairs of two runs. ``inputs``: the run whose inputs anchored them, where at hand."""

    def __init__(self, reference: Run, candidate: Run, inputs: Run | None = None) -> None:
        self.reference, self.candidate = reference, candidate
        self._inputs = inputs

    def tensor(self, run: Run, piece: Piece) -> torch.Tensor:
        return self.rows_of(run.read(piece.record), piece)

    def rows_of(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The piece's own part of a record's tensor, or of one of the same shape."""
        if piece.row is None:
            return tensor
        if tensor.ndim == 1:
            return tensor[piece.row : piece.row + 1]
        return tensor[piece.row : piece.row + 1, piece.left : piece.right].contiguous()

    def base(self, pair: Pair) -> torch.Tensor | None:
        """The pair's part of the block's input in the reference, if it has the output's shape.

        In an anchored pass that is the free input of the run which anchored it. Where that is
        a third run, which is not at hand, the reference's own stands in for it.
        """
        run, record, piece = self._base(pair)
        if record is None or not run.has_bytes(record):
            return None
        return self.rows_of(run.read(record), piece)

    def base_source(self, pair: Pair) -> tuple[Run, Record] | None:
        """The run and record that ``base`` reads, if it reads any."""
        run, record, _ = self._base(pair)
        return None if record is None or not run.has_bytes(record) else (run, record)

    def base_record(self, pair: Pair) -> Record | None:
        """The record of the block's input in the reference, where that is the one that counts."""
        run, record, _ = self._base(pair)
        return record if run is self.reference else None

    def _base(self, pair: Pair) -> tuple[Run, Record | None, Piece]:
        one, two = pair.reference.record, pair.candidate.record
        run, other, piece = self.reference, one, pair.reference
        if pair.pass_ != "free" and self._inputs is not None:
            run = self._inputs
            if run is self.candidate:
                other, piece = two, pair.candidate
        site = other.site.rpartition(":")[0] + ":in"
        record = run.find(("free", other.sample, other.step, site))
        if record is None or record.shape != other.shape or record.positions != other.positions:
            return run, None, piece
        if format_named(record.dtype).kind != "float":
            return run, None, piece
        return run, record, piece

    def row_mask(self, piece: Piece, shape: Sequence[int]) -> torch.Tensor | None:
        """True for real tokens, per row (all leading axes); None where nothing is padded."""
        if piece.row is not None or piece.record.step > 0 or len(shape) < 2:
            return None
        manifest = self.reference.manifest
        group = next((g for g in manifest.tokens.groups if g and g[0] == piece.record.sample), [])
        samples = [manifest.tokens.samples[number] for number in group]
        if not any(s.num_left_pad or s.num_right_pad for s in samples):
            return None
        length = samples[0].num_left_pad + len(samples[0].prompt_ids) + samples[0].num_right_pad
        kept = piece.record.positions
        expected = length if kept is None else len(kept)
        flat = len(shape) == 2 and shape[0] == len(samples) * expected  # a router's tokens
        if not flat and (len(shape) < 3 or shape[0] != len(samples) or shape[1] != expected):
            return None
        import torch

        mask = torch.ones(len(samples), length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            mask[row, : sample.num_left_pad] = False
            if sample.num_right_pad:
                mask[row, -sample.num_right_pad :] = False
        if kept is not None:
            mask = mask[:, list(kept)]
        inner = 1 if flat else math.prod(shape[2:-1])
        return mask.reshape(-1, 1).expand(-1, inner).reshape(-1).contiguous()

    def members(self, piece: Piece, shape: Sequence[int]) -> list[int]:
        """The prompts whose rows follow each other in equal parts; fewer than two where the forward
        held one, or the first axis is none of prompts."""
        if piece.row is not None or len(shape) < 2:
            return []
        groups = self.reference.manifest.tokens.groups
        group = next((g for g in groups if g and g[0] == piece.record.sample), [])
        return list(group) if len(group) > 1 and shape[0] == len(group) else []

    def locate(
        self, piece: Piece, shape: Sequence[int], row: int | None
    ) -> tuple[int | None, int | None]:
        """(sample, token index) of a row, where rows are tokens: pads are not counted."""
        if row is None or len(shape) < 3:
            return None, None
        record, tokens = piece.record, self.reference.manifest.tokens
        inner = max(math.prod(shape[2:-1]), 1)
        member, token = row // (inner * shape[1]), row // inner % shape[1]
        group = next((g for g in tokens.groups if g and g[0] == record.sample), [piece.sample])
        split = piece.row is not None or shape[0] != len(group)
        number = piece.sample if split else group[member]
        sample = tokens.samples[number]
        token += piece.left
        pads = sample.num_left_pad if piece.row is None else piece.pads
        if record.positions is not None:
            known = token < len(record.positions)
            return number, record.positions[token] - pads if known else None
        if record.step == 0:
            length = pads + len(sample.prompt_ids) + sample.num_right_pad
            return number, token - pads if shape[1] <= length else None
        # what was fed before: an encoder-decoder's decoder has a prompt of its own
        before = len(sample.decoder_prompt_ids or sample.prompt_ids)
        return number, before + record.step - 1 + token


def same_positions(
    a: torch.Tensor, one: Record, b: torch.Tensor, two: Record
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where one side holds all tokens and the other some, pick those out."""
    if one.positions == two.positions or a.shape == b.shape:
        return a, b
    if one.positions is not None:
        return a, b[:, list(one.positions)]
    assert two.positions is not None  # they differ from those of the other side
    return a[:, list(two.positions)], b
