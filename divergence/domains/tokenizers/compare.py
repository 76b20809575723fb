"""Finds where two tokenizers part, over texts.

A text goes through a chat template, where it is a chat, a normaliser, a splitter and merges, and
special tokens are put around it. The first of these that makes another thing of it is the cause;
special tokens, which hide nothing else, are told beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from divergence._version import __version__
from divergence.domains.tokenizers.examples import causes_of, compare_examples
from divergence.domains.tokenizers.result import TokenizerSide, TokensReport
from divergence.errors import UsageError
from divergence.facts import Fact, fact, with_sentences
from divergence.recording.engines.hub import hub_out_of_reach
from divergence.recording.engines.load import load_tokenizer
from divergence.recording.prompts import collect_prompts, tokenize
from divergence.words import Progress, Side, first_apart, shortened, silent

_EXCERPT = 40
_NAMED = 20
"""Names of tokens in a fact, at most."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_PLAIN = ("padding_side", "truncation_side", "model_max_length", "clean_up_tokenization_spaces")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")


@with_sentences
def compare_tokens(
    reference: str | Path,
    candidate: str | Path,
    *,
    texts: str | Path | Sequence[str] | None = None,
    chat: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> TokensReport:
    """Compare what two tokenizers make of ``texts``, or two files of what they made.

    ``reference``, ``candidate``: directories or hub ids with a tokenizer; or JSON lines of examples
    (``input_ids``, and ``labels`` or a mask of them), which need no texts. ``texts``: a file of
    prompts (.txt, a text a line; .jsonl or .json with ``text`` or ``messages``), or a list of them.
    ``chat``: texts are a user's turn, and go through each side's chat template, as ``messages`` do.

    Raises UsageError where a side has no tokenizer, PromptError for texts that cannot be read and
    for a chat without a template.
    """
    on_progress = progress or silent
    are_files = [Path(source).is_file() for source in (reference, candidate)]
    if all(are_files) and texts is None:
        return compare_examples(Path(reference), Path(candidate), on_progress)
    if texts is None or any(are_files):
        raise UsageError(
            "two tokenizers are compared over texts, and two files of examples without",
            hint="--texts FILE; or two files of JSON lines with input_ids",
        )
    if isinstance(texts, str | Path):
        prompts = collect_prompts([], texts)
    else:
        prompts = collect_prompts(list(texts), None)
    if any(prompt.input_ids is not None for prompt in prompts):
        raise UsageError("token ids cannot be tokenised", hint="give text or messages")
    sides = [_loaded(str(source), trust_remote_code) for source in (reference, candidate)]
    settings = _settings(*sides)  # a call changes what they say of truncation
    by_name: dict[str, tuple[list[int], Fact]] = {}
    num_equal, num_tokens = 0, [0, 0]
    excerpts: dict[str, str] = {}
    for number, prompt in enumerate(prompts):
        on_progress("texts", number, len(prompts), "")
        samples = [tokenize([prompt], side, chat=chat)[0] for side in sides]
        ids = [list(sample.prompt_ids) for sample in samples]
        num_tokens = [num + len(each) for num, each in zip(num_tokens, ids, strict=True)]
        rendered = [sample.text or "" for sample in samples]
        num_equal += ids[0] == ids[1]
        causes = [] if ids[0] == ids[1] else _causes(sides, rendered, ids)
        for name, item, place in causes:
            numbers, _ = by_name.setdefault(name, ([], item))
            numbers.append(number)
            excerpts.setdefault(name, shortened(rendered[0][max(0, place - 10) :], _EXCERPT))
    return TokensReport(
        tool_version=__version__,
        reference=_side(str(reference), sides[0]),
        candidate=_side(str(candidate), sides[1]),
        chat=chat or any(prompt.messages is not None for prompt in prompts),
        num_texts=len(prompts),
        num_equal=num_equal,
        num_tokens=num_tokens,
        facts=settings,
        causes=causes_of(by_name, excerpts),
    )


def _loaded(source: str, trust_remote_code: bool) -> Any:
    away = hub_out_of_reach(source)
    tokenizer = load_tokenizer(
        source, revision=None, trust_remote_code=trust_remote_code, local=away is not None
    )
    if tokenizer is None and away is not None:
        raise UsageError(
            f"{source} is no directory here, nor a model in the cache, and the hub cannot be "
            "reached",
            where=away,
            hint="a directory with tokenizer.json or tokenizer.model; or go where the network "
            "reaches the hub (HF_ENDPOINT names a mirror)",
        )
    if tokenizer is None:
        raise UsageError(
            f"{source} has no tokenizer that transformers loads",
            hint="a directory with tokenizer.json or tokenizer.model, or a hub id; "
            "--trust-remote-code for one with code of its own",
        )
    return tokenizer


def _side(source: str, tokenizer: Any) -> TokenizerSide:
    return TokenizerSide(source=source, kind=type(tokenizer).__name__, num_tokens=len(tokenizer))


def _causes(
    sides: Sequence[Any], rendered: Sequence[str], ids: Sequence[list[int]]
) -> list[tuple[str, Fact, int]]:
    """(name, what it is, character of A's text from which it shows) of one text."""
    causes: list[tuple[str, Fact, int]] = []
    if rendered[0] != rendered[1]:
        causes.append(("template", _templates(*rendered), first_apart(*rendered)))
        # what the tokenizers make of one rendered text is another question
        ids = [side(rendered[0], add_special_tokens=False)["input_ids"] for side in sides]
    a, b = (side.convert_ids_to_tokens(each) for side, each in zip(sides, ids, strict=True))
    special = [{*side.all_special_tokens} - {side.unk_token} for side in sides]
    starts, ends = [], []
    for tokens, own in zip((a, b), special, strict=True):
        start = next((n for n, token in enumerate(tokens) if token not in own), len(tokens))
        end = next((n for n, token in enumerate(reversed(tokens)) if token not in own), 0)
        starts.append(start)
        ends.append(len(tokens) - (end if start < len(tokens) else 0))
    first, last = a[: starts[0]], b[: starts[1]]
    if first != last:
        causes.append(("start", _start(first, last), 0))
    if a[ends[0] :] != b[ends[1] :]:
        code = fact(
            "tokenizers.end", reference=a[ends[0] :] or None, candidate=b[ends[1] :] or None
        )
        causes.append(("end", code, len(rendered[0])))
    inner_a, inner_b = a[starts[0] : ends[0]], b[starts[1] : ends[1]]
    if inner_a != inner_b:
        causes.append(_inside(sides, rendered[0], inner_a, inner_b))
    else:
        pairs = zip(a, ids[0], b, ids[1], strict=False)
        other = next(((t, x, y) for t, x, u, y in pairs if t == u and x != y), None)
        if other is not None and len(a) == len(b):
            token, x, y = other
            item = fact("tokenizers.ids", token=token, reference=x, candidate=y)
            causes.append(("ids", item, 0))
    return causes


def _templates(a: str, b: str) -> Fact:
    place = first_apart(a, b)
    shown = [_quoted(text[max(0, place - 10) :]) for text in (a, b)]
    values = {"reference": shown[0], "candidate": shown[1]}
    if "".join(a.split()) == "".join(b.split()):
        return fact("tokenizers.template_blanks", **values)
    if place == min(len(a), len(b)):
        side: Side = "reference" if len(a) > len(b) else "candidate"
        more = _quoted(max(a, b, key=len)[place:])
        return fact("tokenizers.template_ending", side=side, text=more)
    return fact("tokenizers.template", **values)


def _start(a: list[str], b: list[str]) -> Fact:
    for side, own, other in (("reference", a, b), ("candidate", b, a)):
        if len(own) > 1 and own[0] == own[1] and other[:1] == own[:1] and len(other) < 2:
            return fact("tokenizers.twice", side=side, token=own[0])
    return fact("tokenizers.start", reference=a or None, candidate=b or None)


def _inside(sides: Sequence[Any], text: str, a: list[str], b: list[str]) -> tuple[str, Fact, int]:
    """Say why the tokens between the special ones differ: what comes first in a tokenizer."""
    place = first_apart(a, b)
    added = [side.added_tokens_decoder.values() for side in sides]
    flags = [{str(token): _flags(token) for token in tokens} for tokens in added]
    for number, (name, own, other) in enumerate((("reference", a, b), ("candidate", b, a))):
        only = flags[number].keys() - flags[1 - number].keys() - {*other}
        alone = next((token for token in own[place:] if token in only), None)
        if alone is not None:
            return "added", fact("tokenizers.added", token=alone, side=name), text.find(alone)
    for token in flags[0].keys() & flags[1].keys():
        if token in text and flags[0][token] != flags[1][token]:
            (key, *_), x, y = _leaf(flags[0][token], flags[1][token])
            item = fact("tokenizers.flag", token=token, name=key, reference=x, candidate=y)
            return "added", item, text.find(token)
    backends = [getattr(side, "backend_tokenizer", None) for side in sides]
    if None not in backends:
        parts = _between(text, set().union(*flags))
        normal = [[_normalised(backend, part) for part in parts] for backend in backends]
        if normal[0] != normal[1]:
            x, y = next(pair for pair in zip(*normal, strict=True) if pair[0] != pair[1])
            at = first_apart(x, y)
            shown = [_quoted(each[max(0, at - 5) :]) for each in (x, y)]
            item = fact("tokenizers.normaliser", reference=shown[0], candidate=shown[1])
            return "normaliser", item, at + max(0, text.find(parts[normal[0].index(x)]))
        for part in normal[0]:
            pieces = [_pieces(backend, part) for backend in backends]
            if pieces[0] != pieces[1]:
                at = first_apart(*pieces)
                spans = [[piece for piece, _ in each[at : at + 3]] for each in pieces]
                item = fact("tokenizers.split", reference=spans[0], candidate=spans[1])
                begin = pieces[0][at][1][0] if at < len(pieces[0]) else len(part)
                return "split", item, begin + max(0, text.find(part))
    item = fact("tokenizers.merges", reference=a[place : place + 4], candidate=b[place : place + 4])
    return "merges", item, max(0, text.find("".join(a[place : place + 1]).lstrip("Ġ▁#")))


def _flags(token: Any) -> dict[str, bool]:
    return {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}


def _between(text: str, tokens: set[str]) -> list[str]:
    """What stands between added tokens: nothing else of a text is normalised and split."""
    if not tokens:
        return [text]
    return [part for part in re.split("|".join(map(re.escape, tokens)), text) if part]


def _quoted(text: str) -> str:
    return json.dumps(shortened(text, _EXCERPT), ensure_ascii=False)


def _normalised(backend: Any, text: str) -> str:
    return str(backend.normalizer.normalize_str(text)) if backend.normalizer else text


def _pieces(backend: Any, text: str) -> list[tuple[str, tuple[int, int]]]:
    splitter = backend.pre_tokenizer
    return list(splitter.pre_tokenize_str(text)) if splitter else [(text, (0, len(text)))]


def _settings(a: Any, b: Any) -> list[Fact]:
    """Return what the tokenizers say of themselves, where they do not say the same."""
    facts = [
        fact("tokenizers.setting", name=name, reference=_shown(x), candidate=_shown(y))
        for name in (*_SPECIAL, *_PLAIN)
        if (x := getattr(a, name, None)) != (y := getattr(b, name, None))
    ]
    vocab_a, vocab_b = a.get_vocab(), b.get_vocab()
    for side, own, other in (("reference", vocab_a, vocab_b), ("candidate", vocab_b, vocab_a)):
        names = sorted(own.keys() - other.keys(), key=own.__getitem__)
        if names:
            facts.append(fact("tokenizers.only", side=side, num=len(names), names=names[:_NAMED]))
    moved = [name for name, number in vocab_a.items() if vocab_b.get(name, number) != number]
    if moved:
        moved.sort(key=vocab_a.__getitem__)
        facts.append(fact("tokenizers.other_ids", num=len(moved), names=moved[:_NAMED]))
    parts_a, parts_b = _parts(a, vocab_b), _parts(b, vocab_a)
    for name, (content, x) in parts_a.items():
        other, y = parts_b.get(name, (content, x))  # a tokenizer of Python code tells none
        if content != other:
            values: dict[str, Any] = {"candidate": y, "key": None, "old": None, "new": None}
            if x == y:
                key, old, new = _leaf(content, other)
                values = {"candidate": None, "key": ".".join(key), "old": old, "new": new}
            facts.append(fact("tokenizers.part", name=name, reference=x, **values))
    templates = [getattr(side, "chat_template", None) for side in (a, b)]
    if templates[0] != templates[1]:
        shown = [None if template is None else str(template) for template in templates]
        place = first_apart(shown[0] or "", shown[1] or "")
        facts.append(fact("tokenizers.template_file", place=place))
    return facts


def _parts(tokenizer: Any, others: Mapping[str, int]) -> dict[str, tuple[Any, str]]:
    """(content, in short) of each part of a fast tokenizer. ``others``: the vocabulary of the other
    one, whose lack of an added token is told already."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return {}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: (state.get(name), _types(state.get(name))) for name in _PARTS}
    model = state["model"]
    merges, vocab = model.pop("merges", None) or [], model.pop("vocab")
    if isinstance(vocab, list):  # of a unigram model each token has a score
        model["scores"] = dict(vocab)
    added = {item["content"]: item | {"id": 0} for item in state["added_tokens"]}
    parts["added_tokens"] = {key: added[key] for key in added if key in others}, "flags"
    return parts | {
        "model": (model, str(model.get("type"))),
        "merges": (merges, f"{len(merges):,}"),
    }


def _leaf(x: Any, y: Any) -> tuple[tuple[str, ...], str, str]:
    """The first value of two JSON values that differs: its keys, and what it is on each side."""
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        x, y = dict(enumerate(x)), dict(enumerate(y))
    if isinstance(x, dict) and isinstance(y, dict):
        for key in x | y:
            if x.get(key) != y.get(key):
                keys, *values = _leaf(x.get(key), y.get(key))
                return (str(key), *keys), values[0], values[1]
    shown = ["none" if value is None else value for value in (x, y)]
    texts = [json.dumps(value, ensure_ascii=False).strip('"') for value in shown]
    begin = max(0, first_apart(*texts) - 10)
    return (), shortened(texts[0][begin:], _EXCERPT), shortened(texts[1][begin:], _EXCERPT)


def _types(part: Any) -> str:
    """``Sequence (Prepend, Replace)``"""
    if not isinstance(part, dict):
        return "none"
    if "type" not in part:  # truncation and padding have none
        return ", ".join(f"{key} {value}" for key, value in part.items())
    inner = next((value for value in part.values() if isinstance(value, list)), [])
    names = [each["type"] for each in inner if isinstance(each, dict) and "type" in each]
    return str(part.get("type")) + (f" ({', '.join(names)})" if names else "")


def _shown(value: Any) -> str | int | None:
    """A limit that no text reaches is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value < 10**9 else None
    return None if value is None else str(value)
