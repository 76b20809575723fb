"""The base file of llama.cpp (``llama-perplexity --kl-divergence-base FILE``): all
log-probabilities of the second half of each chunk of a text, in 16 bits.

    "_logits_", uint32 n_ctx, int32 n_vocab, int32 n_chunk, int32 tokens[n_chunk · n_ctx]
    of each chunk n_ctx - 1 - n_ctx / 2 rows of 2·((n_vocab + 1) / 2) + 4 uint16:
        float scale, float least; then q of each id: log p = scale · q + least

A row is the distribution behind token n_ctx / 2 + row, and so scores the next one. Ids whose log p
is least (16 nats below the likeliest) may be anything below it. Of each row the chunk's own token
and the MOST_TOP likeliest ids are taken. Each chunk is a prompt of its own; llama.cpp puts the
beginning-of-text token in the place of a chunk's first one when it runs, which is not in the file.
"""

from __future__ import annotations

import struct

import numpy as np

from divergence.domains.importing.dumped import Notes
from divergence.domains.importing.layouts import Layout
from divergence.domains.importing.scores import FieldMap, Scored
from divergence.errors import DumpError
from divergence.outside import opened
from divergence.run.foreign import DumpFolder
from divergence.run.scores import Scores, ScoreSource

MOST_TOP = 64
_MAGIC = b"_logits_"
_HEAD = struct.Struct("<8sIii")
_MAX_VOCABULARY, _MAX_CONTEXT = 1 << 22, 1 << 22


def recognise(folder: DumpFolder) -> bool:
    if len(folder.names) != 1:
        return False
    with opened(folder.regular(folder.names[0])) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read(folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
    path = folder.regular(folder.names[0])
    where = str(path)
    with opened(path) as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise _cut(where)
    _, n_ctx, n_vocab, n_chunk = _HEAD.unpack(head)
    if not (4 <= n_ctx <= _MAX_CONTEXT and 1 <= n_vocab <= _MAX_VOCABULARY and n_chunk > 0):
        raise DumpError(f"a context of {n_ctx}, {n_vocab} ids and {n_chunk} chunks", where=where)
    first, width = n_ctx // 2, 2 * ((n_vocab + 1) // 2) + 4
    rows = n_ctx - 1 - first
    begin = _HEAD.size + 4 * n_chunk * n_ctx
    if path.stat().st_size < begin + 2 * n_chunk * rows * width:
        raise _cut(where)
    tokens = np.memmap(path, "<i4", "r", _HEAD.size, (n_chunk, n_ctx))
    table = np.memmap(path, "<u2", "r", begin, (n_chunk, rows, width))
    facts = {
        "tokens": "given",
        "top-k": str(min(MOST_TOP, n_vocab)),
        "rounding": "16 bits over 16 nats",
    }
    scored = Scored(ScoreSource(engine="llama.cpp", facts=facts))
    for chunk in range(n_chunk):
        ids = [int(token) for token in tokens[chunk]]
        if not all(0 <= token < n_vocab for token in ids):
            raise DumpError(f"chunk {chunk} has a token that is no id of {n_vocab}", where=where)
        positions = [first + 1 + row for row in range(rows)]
        values = []
        for codes in table[chunk]:
            scale, least = (float(number) for number in codes[:4].copy().view("<f4"))
            whole = scale * codes[4 : 4 + n_vocab].astype(np.float64) + least
            values.append(np.minimum(0.0, whole))
        orders = [np.argsort(-value, kind="stable")[:MOST_TOP] for value in values]
        scores = Scores(
            prompt_ids=ids[: first + 1],
            generated_ids=ids[first + 1 :],
            positions=positions,
            logprobs=[float(v[ids[p]]) for v, p in zip(values, positions, strict=True)],
            top=[
                [(int(token), float(value[token])) for token in order]
                for value, order in zip(values, orders, strict=True)
            ],
        )
        scored.prompts.append((scores, f"{where}, chunk {chunk}"))
    return scored


def _cut(where: str) -> DumpError:
    return DumpError(
        "the file was cut off",
        where=where,
        hint="run llama-perplexity again, and let it end by itself",
    )


LLAMA_KLD = Layout(words="llama.cpp's base file of KL divergence", recognise=recognise, scores=read)
