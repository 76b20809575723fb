"""The identity of a model: digests of weights, configuration and code."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import torch

from divergence.domain import hook_places, placed
from divergence.numerics.drawn import signs
from divergence.numerics.formats import format_named, format_of
from divergence.recording.code import code_notes
from divergence.recording.engines.load import LoadedModel, weights_of
from divergence.run.manifest import (
    NUM_SUMS,
    CodeNote,
    ConfigValue,
    DerivedNote,
    ModelIdentity,
    ParameterNote,
    ValuesForm,
    digest_json,
    digest_many,
    digest_tensor,
    digest_text,
)

# What is recorded of a parameter beside its digest (run.manifest.ParameterNote), from one reading.

_MOST_AT_ONCE = 1 << 20
_FIRST = 32
"""Numbers that a group of codes with one scale holds at least."""
_MOST_LEVELS = 128


def parameter_note(tensor: torch.Tensor, digest: str) -> ParameterNote | None:
    """``digest``: of its own bytes. None for what is no floating-point number of 16 bits or more,
    and for one without bytes."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.is_meta:
        return None
    own = format_of(tensor.dtype).name
    forms: tuple[ValuesForm, ...] = get_args(ValuesForm)
    rounded: dict[ValuesForm, str] = {}
    form: ValuesForm = cast(ValuesForm, own)
    values = digest
    for target in forms[: forms.index(own) if own in forms else 0]:
        narrow = tensor.to(format_named(target).torch_dtype)
        narrow_digest = digest_tensor(narrow)
        # Does the narrower copy hold the very values?
        pieces = zip(
            narrow.reshape(-1).split(_MOST_AT_ONCE),
            tensor.reshape(-1).split(_MOST_AT_ONCE),
            strict=True,
        )
        if all(
            bool(((small.to(tensor.dtype) == piece) | piece.isnan()).all())
            for small, piece in pieces
        ):
            form, values = target, narrow_digest
            break
        rounded[target] = narrow_digest
    # The norm, and the sums with signs, in one product a piece
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    columns = torch.from_numpy(signs(rows.shape[1], 2 * NUM_SUMS)).to(tensor.device, wide)
    columns = torch.cat([columns, torch.ones_like(columns[:, :1])], 1)
    totals = torch.zeros(3 * NUM_SUMS, dtype=torch.float64)
    square, nonfinite = 0.0, 0
    step = max(1, _MOST_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].to(wide)
        if not (finite := part.isfinite()).all():
            nonfinite += int((~finite).sum())
            part = part.masked_fill(~finite, 0)
        by_place = torch.from_numpy(signs(len(part), 2 * NUM_SUMS, start)).to(tensor.device, wide)
        square += float(torch.linalg.vector_norm(part)) ** 2
        by_column, by_both, total = (part @ columns).split([NUM_SUMS, NUM_SUMS, 1], 1)
        by_row = total * by_place[:, :NUM_SUMS]
        by_both = by_both * by_place[:, NUM_SUMS:]
        totals += torch.cat([by_column.sum(0), by_row.sum(0), by_both.sum(0)]).cpu().double()
    norm, sums = square**0.5, totals.tolist()
    return ParameterNote(
        dtype=own,
        shape=list(tensor.shape),
        form=form,
        values=values,
        rounded=rounded,
        norm=norm,
        sums=sums,
        levels=_levels(tensor),
        nonfinite=nonfinite,
        strides=None if tensor.is_contiguous() else list(tensor.stride()),
    )


def _levels(tensor: torch.Tensor) -> int | None:
    """Count the steps that the largest of its first numbers is, where all are whole steps."""
    row = tensor.detach().reshape(-1)[: tensor.shape[-1] if tensor.ndim else 0]
    if len(row) < _FIRST:
        return None
    first = row[:_FIRST].cpu().double()
    largest = float(first.abs().max())
    if not 0 < largest < float("inf") or len(first.unique()) < 4:
        return None
    counts = torch.arange(2, _MOST_LEVELS + 1, dtype=torch.float64)[:, None]
    steps = first * (counts / largest)
    rounding = 2 * torch.finfo(tensor.dtype).eps * steps.abs() + 1e-9
    whole = ((steps - steps.round()).abs() <= rounding).all(1).nonzero().flatten()
    return int(counts[whole[0], 0]) if len(whole) else None


# Who a model is: digests of its weights, config, tokenizer and chat template.
#
# Digests are of values, not of files: the same weights give the same digest from
# any checkpoint layout and on any device. Only what a checkpoint stores counts
# (parameters and persistent buffers); tables computed at start-up are not identity,
# they are results, and are seen at their sites.
#
# The configuration is recorded as well, as one level of dotted keys with plain values: what a
# person compares line by line. No names, paths or tokens of access; what is long (a table of
# labels) stands as its digest.

_VOLATILE = """
    transformers_version _name_or_path dtype torch_dtype _attn_implementation attn_implementation
    _attn_implementation_autoset experts_implementation _experts_implementation architectures
    use_cache output_attentions output_hidden_states return_dict distributed_config
""".split()
"""What does not change the numbers that the weights stand for, or is recorded elsewhere."""
_NARROWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}


def identify(
    loaded: LoadedModel, *, on_parameter: Callable[[int, int, str], None] | None = None
) -> ModelIdentity:
    """Digest everything. ``on_parameter(done, total, name)`` reports progress.

    Weights that lie in pieces on several ranks are put together one at a time, those on disk
    brought in one module at a time, and those that only some ranks have are asked of them: the
    identity is that of the whole model. All ranks must ask.
    """
    module = loaded.module
    state = dict(_stored(loaded))
    digests: dict[str, str] = {}
    narrowed: dict[str, dict[str, str]] = {}
    notes: dict[str, ParameterNote] = {}
    sizes = {
        name: (format_of(tensor.dtype).name, tensor.numel())
        for name, tensor in state.items()
        if tensor.is_floating_point()
        and tensor.itemsize > 1  # codes of 8 bits are no dtype to run in
    }
    numels = {name: weight.numel() for name, weight in module.named_parameters()}
    ranks = loaded.ranks
    pipeline = ranks is not None and "pp" in ranks.sizes
    if ranks is not None and pipeline:
        sizes = {key: size for part in ranks.gather(sizes) for key, size in part.items()}
    dtype = usual_dtype(sizes.values()) or "float32"
    silent = ranks is not None and not (pipeline or ranks.is_first)
    for number, (name, tensor) in enumerate(_stored(loaded, whole=True)):
        if on_parameter is not None:
            on_parameter(number, len(state), name)
        if silent:
            continue  # it took part in putting the weight together; the first rank's word counts
        digests[name] = digest_tensor(tensor)
        note = parameter_note(tensor, digests[name])
        if note is not None:
            notes[name] = note
        for target in _NARROWER.get(dtype, ()):
            digest = digests[name]
            if tensor.is_floating_point() and not _stays_wide(module, name, target):
                by_form: dict[str, str] = {}
                if note is not None:
                    by_form = {str(form): digest for form, digest in note.rounded.items()}
                    by_form[note.form] = note.values
                digest = by_form.get(target) or digest_tensor(
                    tensor.to(format_named(target).torch_dtype)
                )
            narrowed.setdefault(target, {})[name] = digest
    if ranks is not None and pipeline:
        for others, wide, counts, other_notes in ranks.gather((digests, narrowed, numels, notes)):
            digests, notes = others | digests, other_notes | notes
            numels = counts | numels
            for target, values in wide.items():
                narrowed[target] = values | narrowed.get(target, {})
    dequantized: dict[str, str] = {}  # equal on every machine, where codes and scales are
    if loaded.codes is not None and ranks is None:
        products = loaded.codes.weights()
        dequantized = {path: digest_tensor(weight.detach()) for path, weight in products}
    tokenizer = loaded.tokenizer
    template = getattr(tokenizer, "chat_template", None)
    structure: Any = loaded.structure
    groups: dict[int, list[str]] = {}
    for name, weight in structure.named_parameters(remove_duplicate=False):
        groups.setdefault(id(weight), []).append(name)
    rows: dict[str, Any] = {}
    for field, side in (("embedding_rows", "input"), ("head_rows", "output")):
        try:
            weight = getattr(getattr(structure, f"get_{side}_embeddings")(), "weight", None)
        except (AttributeError, NotImplementedError, TypeError):
            weight = None
        rows[field] = None if weight is None or weight.ndim != 2 else int(weight.shape[0])
    tokenizer_size = None
    with contextlib.suppress(Exception):  # of a tokenizer's own code
        tokenizer_size = None if tokenizer is None else len(tokenizer)
    described: dict[str, Any] = {}
    for place in hook_places("identity").values():
        described |= placed(place)(module, loaded.quantization)
    return ModelIdentity(
        source=_portable_source(loaded.source),
        revision=loaded.revision,
        model_class=type(loaded.structure).__name__,
        task=loaded.task,
        dtype=dtype,
        num_parameters=sum(numels.values()),
        digest=digest_many(digests),
        digests=digests,
        parameters=notes,
        rounded_digests={name: digest_many(values) for name, values in narrowed.items()},
        dequantized=dequantized,
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template_digest=None if template is None else digest_json(template),
        trust_remote_code=loaded.trust_remote_code,
        missing=loaded.missing,
        chat_example=chat_example(tokenizer),
        tied=[names for names in groups.values() if len(names) > 1],
        tokenizer_size=tokenizer_size,
        **rows,
        **described,
        **configured(module),
    )


def configured(module: torch.nn.Module) -> dict[str, Any]:
    """The fields of a ModelIdentity for what any module tells of itself: its code, and the
    configuration that a model of transformers has."""
    code: dict[str, CodeNote] = {}  # not recorded where that fails, which comparisons say
    with contextlib.suppress(Exception):  # modules are anybody's code
        code = code_notes(module)
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return {"code": code, "config_digest": ""}
    steady = _steady(config.to_dict())
    # which implementation of experts was chosen is a setting, so no part of the digest
    chosen = getattr(config, "_experts_implementation", None)
    experts = {"experts_implementation": chosen} if isinstance(chosen, str) else {}
    return {
        "code": code,
        "config_digest": digest_json(steady),
        "config": config_values(steady | experts),
        "attn_implementation": getattr(config, "_attn_implementation", None),
    }


def usual_dtype(sizes: Iterable[tuple[str, int]]) -> str | None:
    """The dtype of most numbers. ``sizes``: (dtype, how many numbers) of each tensor."""
    counts: Counter[str] = Counter()
    for dtype, numel in sizes:
        counts[dtype] += numel
    return counts.most_common(1)[0][0] if counts else None


def _stored(loaded: LoadedModel, *, whole: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Name → tensor as the checkpoint has them: codes where weights were dequantised. ``whole``:
    each put together and brought in, else as it lies."""
    module, codes = loaded.module, loaded.codes
    prefixes = tuple(f"{path}." for path in codes.paths) if codes is not None else ()
    for name, tensor in weights_of(module) if whole else module.state_dict().items():
        if not name.startswith(prefixes) if prefixes else True:
            yield name, tensor
    if codes is not None:
        yield from codes.stored()


def _portable_source(source: str) -> str:
    """The model's id or path; a path below the home directory is written with ``~``."""
    path = Path(source).expanduser()
    if not path.exists():
        return source
    path = path.resolve()
    home = Path.home()
    if home != Path("/") and path.is_relative_to(home):
        return str(Path("~") / path.relative_to(home))
    return str(path)


def without_home(text: str) -> str:
    """``text`` with the user's home directory written as ``~``: a run names no user."""
    home = str(Path.home())
    return text if home == "/" else text.replace(home + "/", "~/")


def _stays_wide(module: Any, name: str, target: str) -> bool:
    """Does transformers keep this parameter in float32 when it loads the model in ``target``?"""
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if target == "float16":
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return any(re.search(rf"(?:^|\.){re.escape(part)}(?:\.|$)", name) for part in kept)


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _steady(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_steady(item) for item in value]
    return value


def tokenizer_digest(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        values = json.loads(backend.to_str())
        values.pop("truncation", None)  # set by the last call, not by the tokenizer's files
        values.pop("padding", None)
        return digest_json(values)
    return digest_text(json.dumps(tokenizer.get_vocab(), sort_keys=True))


MAX_CONFIG_BYTES = 64 << 10
"""Of all values together; what comes after it stands as digests."""
_MAX_LIST = 256
_MAX_TEXT = 200
_UNTOLD = re.compile(r"(^|[._])(name_or_path|path|token|api_key|secret|user|cache_dir)$|_file$")
"""Keys that may name a person, a place or a secret."""
_PATH = re.compile(r"^(~|/|\\\\|[A-Za-z]:[\\/])|://")
_EXAMPLE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
]
_MAX_EXAMPLE = 4000


def config_values(config: dict[str, Any]) -> dict[str, ConfigValue]:
    """Dotted key → value, in the order of keys."""
    values: dict[str, ConfigValue] = {}
    _flatten(config, "", values)
    size = 0
    for key in sorted(values):
        size += len(key) + len(str(values[key]))
        if size > MAX_CONFIG_BYTES:
            values[key] = _digest(values[key])
    return dict(sorted(values.items()))


def _flatten(value: Any, key: str, values: dict[str, ConfigValue]) -> None:
    if _UNTOLD.search(key):
        return
    if isinstance(value, dict):
        # labels by number are a list in disguise
        table = len(value) > 8 and all(str(name).isdecimal() for name in value)
        if key and (len(value) > _MAX_LIST or table):
            values[key] = _digest(value)
            return
        for name, inner in value.items():
            _flatten(inner, f"{key}.{name}" if key else str(name), values)
    elif isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        long = len(value) > _MAX_LIST or any(item is _NOT_PLAIN for item in items)
        values[key] = _digest(value) if long else items
    else:
        plain = _plain(value)
        values[key] = _digest(value) if plain is _NOT_PLAIN else plain


_NOT_PLAIN: Any = object()


def _plain(value: Any) -> Any:
    """The value as JSON knows it; ``_NOT_PLAIN`` for what is no plain value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        if _PATH.search(value):
            return "(a path)"
        return str(value) if len(value) <= _MAX_TEXT else _NOT_PLAIN
    return _NOT_PLAIN if isinstance(value, dict | list | tuple) else type(value).__name__


def _digest(value: Any) -> str:
    return f"digest {digest_json(value)[:16]}"


def chat_example(tokenizer: Any) -> str | None:
    """A fixed conversation as the chat template renders it, so that two templates can be held
    against each other; None without a template, and where it takes none of the conversations."""
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        return None
    for conversation in (_EXAMPLE, _EXAMPLE[1:], _EXAMPLE[1:2]):
        try:
            text = tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # templates raise errors of their own: no system prompt, for example
            continue
        return str(text)[:_MAX_EXAMPLE]
    return None


# Tensors that a model computes with and no checkpoint stores: modules make them when they are
# built (rotary frequencies, masks, tables).
#
# All weights may agree and these differ: frequencies made anew as an empty tensor, a theta read
# from the wrong key, a table cast to 16 bits. They are read when the model is loaded, and small
# ones again behind each group of prompts, since a server may lose them while it runs.

_WATCHED_BYTES = 1 << 20
"""What is larger is not digested again while the model runs."""
_NUM_VALUES = 64


def derived_state(module: torch.nn.Module) -> dict[str, DerivedNote]:
    """Note, by dotted name, buffers that are not in the state dict and tensors that are plain
    attributes of modules. What lies on no device, or in pieces on several, is left out."""
    notes = {}
    for name, tensor in _tensors(module):
        values = tensor.flatten()[:_NUM_VALUES].tolist()
        notes[name] = DerivedNote(
            digest=digest_tensor(tensor),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            values=[value if math.isfinite(value) else str(value) for value in values],
        )
    return notes


def note_changes(module: torch.nn.Module, notes: Mapping[str, DerivedNote], sample: int) -> None:
    """Sets ``changed_after`` of those that are no longer what their note says. ``sample``: the
    prompt that has just run."""
    tensors = dict(_tensors(module)) if notes else {}
    for name, note in notes.items():
        tensor = tensors.get(name)
        if note.changed_after is None and tensor is not None and tensor.nbytes <= _WATCHED_BYTES:
            note.changed_after = sample if digest_tensor(tensor) != note.digest else None


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        stored = set(part._buffers.keys()) - part._non_persistent_buffers_set
        for name, tensor in (*part._buffers.items(), *vars(part).items()):
            # of a DTensor each rank has a piece
            if type(tensor) is torch.Tensor and name not in stored and not tensor.is_meta:
                yield f"{path}.{name}".lstrip("."), tensor.detach()
