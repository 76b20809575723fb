"""A model's configuration as plain data, and the few sizes that tell variants of it apart.

One level of dotted keys, plain values: what a person compares line by line. No names, paths or
tokens of access; what is long (a table of labels) stands as its digest, which still tells whether
two are equal.
"""

from __future__ import annotations

import math
import re
from typing import Any

from divergence.run.schema.fingerprint import digest_json
from divergence.run.schema.manifest import ConfigValue

__all__ = ["MAX_CONFIG_BYTES", "chat_example", "config_values", "size_facts"]

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
    found: dict[str, ConfigValue] = {}
    _flatten(config, "", found)
    size = 0
    for key in sorted(found):
        size += len(key) + len(str(found[key]))
        if size > MAX_CONFIG_BYTES:
            found[key] = _digest(found[key])
    return dict(sorted(found.items()))


def _flatten(value: Any, key: str, found: dict[str, ConfigValue]) -> None:
    if _UNTOLD.search(key):
        return
    if isinstance(value, dict):
        if key and (len(value) > _MAX_LIST or _is_table(value)):
            found[key] = _digest(value)
            return
        for name, inner in value.items():
            _flatten(inner, f"{key}.{name}" if key else str(name), found)
    elif isinstance(value, list | tuple):
        plain = [_plain(one) for one in value]
        if len(value) > _MAX_LIST or any(one is _NOT_PLAIN for one in plain):
            found[key] = _digest(value)
        else:
            found[key] = plain
    else:
        plain_value = _plain(value)
        found[key] = _digest(value) if plain_value is _NOT_PLAIN else plain_value


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


def _is_table(value: dict[Any, Any]) -> bool:
    """Labels by number: a list in disguise."""
    return len(value) > 8 and all(str(key).isdecimal() for key in value)


def _digest(value: Any) -> str:
    return f"digest {digest_json(value)[:16]}"


def size_facts(module: Any, tokenizer: Any) -> dict[str, Any]:
    """``tied``, ``embedding_rows``, ``head_rows`` and ``tokenizer_size`` of ModelIdentity."""
    groups: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(weight), []).append(name)
    sizes = {}
    for field, getter in (
        ("embedding_rows", "get_input_embeddings"), ("head_rows", "get_output_embeddings")
    ):  # fmt: skip
        try:
            weight = getattr(getattr(module, getter)(), "weight", None)
        except (AttributeError, NotImplementedError, TypeError):
            weight = None
        sizes[field] = None if weight is None or weight.ndim != 2 else int(weight.shape[0])
    return {
        "tied": [names for names in groups.values() if len(names) > 1],
        "tokenizer_size": _tokenizer_size(tokenizer),
        **sizes,
    }


def _tokenizer_size(tokenizer: Any) -> int | None:
    try:
        return None if tokenizer is None else len(tokenizer)
    except Exception:  # of a tokenizer's own code
        return None


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
