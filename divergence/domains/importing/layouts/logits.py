"""Logits, caches and log-probabilities of engines that have no modules.

``LLAMA_DEBUG``: llama.cpp's ``llama-debug --save-logits`` and examples/model-conversion:
``llamacpp-MODEL.bin`` (or ``pytorch-MODEL.bin``) holds logits of the last token, or of all, as
float32, whatever they were computed in; ``...-tokens.bin`` beside it the prompt's ids as int32.

``EDGE``: TensorRT-Edge-LLM's layer debugger, one safetensors file: ``round_R.logits`` (B, V) and
``round_R.layer_I.kv`` (B, 2, heads, longest, width), of which ``round_R.context_lengths`` (B) are
real. Round 0 is the prefill.

``LLAMA_KLD``: the base file of llama.cpp (``llama-perplexity --kl-divergence-base FILE``), all
log-probabilities of the second half of each chunk of a text, in 16 bits.

    "_logits_", uint32 n_ctx, int32 n_vocab, int32 n_chunk, int32 tokens[n_chunk · n_ctx]
    of each chunk n_ctx - 1 - n_ctx / 2 rows of 2·((n_vocab + 1) / 2) + 4 uint16:
        float scale, float least; then q of each id: log p = scale · q + least

A row is the distribution behind token n_ctx / 2 + row, and so scores the next one. Ids whose log p
is least (16 nats below the likeliest) may be anything below it. Of each row the chunk's own token
and the _MOST_TOP likeliest ids are taken. Each chunk is a prompt of its own; llama.cpp puts the
beginning-of-text token in the place of a chunk's first one when it runs, which is not in the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np
import torch

from divergence.domains.importing.dumped import Dumped, DumpedForward, Notes, module_site
from divergence.domains.importing.layouts import Layout, holding
from divergence.domains.importing.rules import Rules
from divergence.domains.importing.scores import FieldMap, Scored
from divergence.errors import DumpError
from divergence.outside import opened
from divergence.run.foreign import DumpFolder
from divergence.run.scores import Scores, ScoreSource

_BINARY = re.compile(r"(?:.*/)?(?P<stem>(?:llamacpp|pytorch)-.+?)(?<!-tokens)(?<!-embeddings)\.bin")
_TOKENS = "-tokens.bin"
_MOST_TOKENS = 1 << 20


def _read_debug(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    names = [name for name in folder.names if _BINARY.fullmatch(name)]
    if len(names) != 1:
        raise DumpError(
            f"{len(names)} files of logits, not one",
            where=str(folder.path),
            hint="name one of them: llamacpp-MODEL.bin",
        )
    (name,) = names
    beside = name.removesuffix(".bin") + _TOKENS
    where, path = folder.where(name), folder.regular(name)
    if path.stat().st_size % 4:
        raise DumpError("the file is no row of float32", where=where, hint="it was cut off")
    values = torch.from_numpy(np.fromfile(path, "<f4"))
    tokens = path.with_name(path.name.removesuffix(".bin") + _TOKENS)
    tensors = []
    rows = values.reshape(1, 1, -1)
    positions = None
    if beside in folder.names or (len(folder.names) == 1 and tokens.is_file()):
        ids = np.fromfile(folder.regular(beside), "<i4").astype(np.int64)
        if not 0 < len(ids) <= _MOST_TOKENS or ids.min() < 0:
            raise DumpError("these are no token ids", where=folder.where(beside))
        tensors.append(Dumped(site="model.embed_tokens:in", tensor=torch.from_numpy(ids)[None]))
        width, rest = divmod(values.numel(), len(ids))
        if not rest and width > 2 * len(ids) and width > int(ids.max()) and len(ids) > 1:
            rows = values.reshape(1, len(ids), width)  # of every token
        else:
            positions = (len(ids) - 1,)
    tensors.append(Dumped(site="lm_head:out", tensor=rows, positions=positions))
    yield DumpedForward(where=where, tensors=tensors, number=0)


_KEY = re.compile(r"round_(?P<round>\d{1,9})\.(?P<what>logits|layer_(?P<layer>\d{1,6})\.kv)")


def _is_edge(folder: DumpFolder) -> bool:
    names = [name for name in folder.names if name.endswith(".safetensors")]
    if len(names) != 1:
        return False
    table = folder.value(names[0])
    return isinstance(table, dict) and any(_KEY.fullmatch(str(key)) for key in table)


def _read_edge(folder: DumpFolder, rules: Rules | None, notes: Notes) -> Iterator[DumpedForward]:
    name = next(name for name in folder.names if name.endswith(".safetensors"))
    table, where = folder.value(name), folder.where(name)
    rounds: dict[int, list[Dumped]] = {}
    for key in table:
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        number, tensor = int(match["round"]), table[key]
        tensors_there = rounds.setdefault(number, [])
        if match["layer"] is None:
            tensors_there.append(
                Dumped(site="lm_head:out", tensor=tensor.reshape(len(tensor), 1, -1))
            )
            continue
        lengths = table.get(f"round_{number}.context_lengths")
        if not isinstance(lengths, torch.Tensor) or tensor.ndim != 5 or tensor.shape[1] != 2:
            raise DumpError(f"{key} is no cache with its context_lengths", where=where)
        if len(set(lengths.reshape(-1).tolist())) != 1:
            raise DumpError(
                f"round {number} holds prompts of several lengths",
                where=where,
                hint="dump one request at a time",
            )
        length = int(lengths.reshape(-1)[0])
        if not 0 < length <= tensor.shape[3]:
            raise DumpError(
                f"{key} has room for {tensor.shape[3]} tokens, not for {length}", where=where
            )
        # (B, heads, tokens, width) as (B, tokens, heads, width)
        for part, what in enumerate(("key", "value")):
            site = module_site(f"model.layers.{match['layer']}.self_attn.{what}_cache", "out")
            values = tensor[:, part, :, :length].transpose(1, 2).contiguous()
            tensors_there.append(Dumped(site=site, tensor=values))
    for number in sorted(rounds):
        # a layer's cache is written before the logits
        tensors = sorted(rounds[number], key=lambda dumped: dumped.site == "lm_head:out")
        yield DumpedForward(where=where, tensors=tensors, number=number)


LLAMA_DEBUG = Layout(
    words="llama-debug's logits", recognise=holding(_BINARY), read=_read_debug, dtype="bfloat16"
)
EDGE = Layout(words="TensorRT-Edge-LLM's layer debugger", recognise=_is_edge, read=_read_edge)


# llama.cpp's base file.

_MOST_TOP = 64
_MAGIC = b"_logits_"
_HEAD = struct.Struct("<8sIii")
_MAX_VOCABULARY, _MAX_CONTEXT = 1 << 22, 1 << 22


def _is_kld(folder: DumpFolder) -> bool:
    if len(folder.names) != 1:
        return False
    with opened(folder.regular(folder.names[0])) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _read_kld(folder: DumpFolder, fields: FieldMap | None, notes: Notes) -> Scored:
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
        "top-k": str(min(_MOST_TOP, n_vocab)),
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
        orders = [np.argsort(-value, kind="stable")[:_MOST_TOP] for value in values]
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


LLAMA_KLD = Layout(
    words="llama.cpp's base file of KL divergence", recognise=_is_kld, scores=_read_kld
)
