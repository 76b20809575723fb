"""Finds where two tokenizers part, over texts.

A text goes through a chat template, where it is a chat, a normaliser, a splitter and merges, and
special tokens are put around it. The first of these that makes another thing of it is the cause;
special tokens, which hide nothing else, are told beside it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from divergence.domains.tokenizers.examples import Row, compare_examples, compare_masks, report_on
from divergence.domains.tokenizers.result import TokenizerSide, TokensReport
from divergence.errors import UsageError
from divergence.facts import Fact, fact, with_sentences
from divergence.recording.engines.hub import hub_out_of_reach
from divergence.recording.engines.load import load_tokenizer
from divergence.recording.prompts import Prompt, collect_prompts, tokenize
from divergence.words import SIDES, Progress, first_apart, shortened, silent

_EXCERPT = 40
_NAMED = 20
"""Names of tokens in a fact, at most."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_PLAIN = ("padding_side", "truncation_side", "model_max_length", "clean_up_tokenization_spaces")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a template has around the tokens that training gives labels."""


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
    ``chat``: texts are a user's turn, and go through each side's chat template, as ``messages`` do;
    of messages with answers the templates' label masks are compared too.

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

    def rows() -> Iterator[Row]:
        for number, prompt in enumerate(prompts):
            on_progress("texts", number, len(prompts), "")
            samples = [tokenize([prompt], side, chat=chat)[0] for side in sides]
            ids = [list(sample.prompt_ids) for sample in samples]
            rendered = [sample.text or "" for sample in samples]
            causes = [] if ids[0] == ids[1] else _causes(sides, rendered, ids)
            shown = [(name, what, _excerpt(rendered[0], at)) for name, what, at in causes]
            shown += [] if causes else _masks(sides, prompt)
            text = "\n".join(message.content for message in prompt.conversation)
            later = [("truncation", what, _excerpt(text, 0)) for what in _cut(sides, ids)]
            if chat or prompt.messages is not None:
                later += [("twice", w, _excerpt(rendered[0], 0)) for w in _twice(sides, rendered)]
            yield Row(ids, [*shown, *later], equal=not shown, text=text)

    return report_on(
        [
            TokenizerSide(source=str(name), kind=type(side).__name__, num_tokens=len(side))
            for name, side in zip((reference, candidate), sides, strict=True)
        ],
        rows(),
        chat=chat or any(prompt.messages is not None for prompt in prompts),
        facts=settings,
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


def _causes(
    sides: Sequence[Any], rendered: Sequence[str], ids: Sequence[list[int]]
) -> list[tuple[str, Fact, int]]:
    """(name, what it is, character of A's text from which it shows) of one text."""
    causes: list[tuple[str, Fact, int]] = []
    text = rendered[0]
    if text != rendered[1]:
        causes.append(("template", _templates(*rendered), first_apart(*rendered)))
        # what the tokenizers make of one rendered text is another question
        ids = [side(text, add_special_tokens=False)["input_ids"] for side in sides]
    tokens = [side.convert_ids_to_tokens(each) for side, each in zip(sides, ids, strict=True)]
    parts = []
    for each, side in zip(tokens, sides, strict=True):
        special = {*side.all_special_tokens} - {side.unk_token}
        inner = [n for n, token in enumerate(each) if token not in special] or [len(each)]
        parts.append((each[: inner[0]], each[inner[0] : inner[-1] + 1], each[inner[-1] + 1 :]))
    (first, a, last), (other_first, b, other_last) = parts
    if first != other_first:
        causes.append(("start", _start(first, other_first), 0))
    if last != other_last:
        what = fact("tokenizers.end", reference=last or None, candidate=other_last or None)
        causes.append(("end", what, len(text)))
    if a != b:
        causes.append(_inside(sides, text, a, b))
    elif tokens[0] == tokens[1] and ids[0] != ids[1]:
        at = first_apart(*ids)
        x, y = ids[0][at], ids[1][at]
        item = fact("tokenizers.ids", token=tokens[0][at], reference=x, candidate=y)
        causes.append(("ids", item, 0))
    return causes


def _templates(a: str, b: str) -> Fact:
    place = first_apart(a, b)
    shown = [_quoted(text[max(0, place - 10) :]) for text in (a, b)]
    if "".join(a.split()) == "".join(b.split()):
        return fact("tokenizers.template_blanks", reference=shown[0], candidate=shown[1])
    side, more, less = (SIDES[0], a, b) if len(a) > len(b) else (SIDES[1], b, a)
    for end, same, text in (
        ("ending", more.startswith(less), more[len(less) :]),
        ("beginning", more.endswith(less), more[: len(more) - len(less)]),
    ):
        if same:
            return fact(f"tokenizers.template_{end}", side=side, text=_quoted(text))
    return fact("tokenizers.template", reference=shown[0], candidate=shown[1])


def _start(a: list[str], b: list[str]) -> Fact:
    for side, own, other in ((SIDES[0], a, b), (SIDES[1], b, a)):
        if len(own) > 1 and own[0] == own[1] and other[:1] == own[:1] and len(other) < 2:
            return fact("tokenizers.twice", side=side, token=own[0])
    return fact("tokenizers.start", reference=a or None, candidate=b or None)


def _inside(sides: Sequence[Any], text: str, a: list[str], b: list[str]) -> tuple[str, Fact, int]:
    """Say why the tokens between the special ones differ: what comes first in a tokenizer."""
    place = first_apart(a, b)
    flags = [
        {
            str(token): {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
            for token in side.added_tokens_decoder.values()
        }
        for side in sides
    ]
    for number, (own, other) in enumerate(((a, b), (b, a))):
        only = flags[number].keys() - flags[1 - number].keys() - {*other}
        if alone := next((token for token in own[place:] if token in only), None):
            what = fact("tokenizers.added", token=alone, side=SIDES[number])
            return "added", what, text.find(alone)
    for token in flags[0].keys() & flags[1].keys():
        if token in text and flags[0][token] != flags[1][token]:
            (key, *_), x, y = _leaf(flags[0][token], flags[1][token])
            item = fact("tokenizers.flag", token=token, name=key, reference=x, candidate=y)
            return "added", item, text.find(token)
    backends: list[Any] = [getattr(side, "backend_tokenizer", None) for side in sides]
    added = "|".join(map(re.escape, set().union(*flags)))
    # what stands between added tokens: nothing else of a text is normalised and split
    parts = [] if None in backends else re.split(added, text) if added else [text]
    for part in filter(None, parts):
        begin = max(0, text.find(part))
        normal = [
            str(backend.normalizer.normalize_str(part)) if backend.normalizer else part
            for backend in backends
        ]
        if normal[0] != normal[1]:
            at = first_apart(*normal)
            shown = [_quoted(each[max(0, at - 5) :]) for each in normal]
            if len({unicodedata.normalize("NFC", each) for each in shown}) == 1:  # they look alike
                shown = [ascii(each)[1:-1] for each in shown]
            item = fact("tokenizers.normaliser", reference=shown[0], candidate=shown[1])
            return "normaliser", item, at + begin
        splitters = [backend.pre_tokenizer for backend in backends]
        whole = [(normal[0], (0, len(normal[0])))]
        pieces = [each.pre_tokenize_str(normal[0]) if each else whole for each in splitters]
        if pieces[0] != pieces[1]:
            at = first_apart(*pieces)
            spans = _readable(sides, [[piece for piece, _ in each[at : at + 3]] for each in pieces])
            item = fact("tokenizers.split", reference=spans[0], candidate=spans[1])
            at = pieces[0][at][1][0] if at < len(pieces[0]) else len(part)
            return "split", item, at + begin
    tokens = _readable(sides, [a[place : place + 4], b[place : place + 4]])
    item = fact("tokenizers.merges", reference=tokens[0], candidate=tokens[1])
    return "merges", item, max(0, text.find("".join(tokens[0][:1]).strip('"').strip()))


def _readable(sides: Sequence[Any], tokens: Sequence[list[str]]) -> list[list[str]]:
    """What tokens of each side stand for, in quotes; as the vocabulary has it where that is no
    whole character, and where a decoder hides what differs."""
    texts = [
        [_name(side, token) for token in each] for side, each in zip(sides, tokens, strict=True)
    ]
    return [*tokens] if texts[0] == texts[1] else texts


def _name(tokenizer: Any, token: str) -> str:
    text = str(tokenizer.convert_tokens_to_string([token]))
    return _quoted(token if "\ufffd" in text or not text else text)


def _masks(sides: Sequence[Any], prompt: Prompt) -> list[tuple[str, Fact, str]]:
    """How tokens of a chat's answers that the templates mark ({% generation %}) differ."""
    if not any(message.role == "assistant" for message in prompt.messages or ()):
        return []
    chat = [msgspec.structs.asdict(message) for message in prompt.conversation]
    made = []
    for side in sides:
        marks = _MARKS.search(str(side.chat_template)) is not None
        made.append(
            side.apply_chat_template(
                chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=marks
            )
        )
    ids = [list(each["input_ids"]) for each in made]
    masks = [each.get("assistant_masks") for each in made]
    if ids[0] != ids[1]:
        return []

    def named(token: int) -> str:
        return _name(sides[0], str(sides[0].convert_ids_to_tokens(token)))

    return [
        (name, what, _excerpt(sides[0].decode(ids[0][max(0, place - 2) :]), 0))
        for name, what, place in compare_masks(ids[0], masks[0], masks[1], named)
    ]


def _cut(sides: Sequence[Any], ids: Sequence[list[int]]) -> list[Fact]:
    """What is kept of a text that is longer than a side's limit, where the sides say otherwise."""
    limits = [(int(side.model_max_length), side.truncation_side) for side in sides]
    kept = [min(most, len(each)) for (most, _), each in zip(limits, ids, strict=True)]
    cut = [end if most < len(each) else None for (most, end), each in zip(limits, ids, strict=True)]
    if limits[0] == limits[1] or cut == [None, None]:
        return []
    values: dict[str, Any] = {"cut": cut[0], "candidate_cut": cut[1]}
    return [fact("tokenizers.truncation", reference=kept[0], candidate=kept[1], **values)]


def _twice(sides: Sequence[Any], rendered: Sequence[str]) -> list[Fact]:
    """Of which side alone a template and the tokenizer both begin a text that is rendered first."""
    starts = [side(text)["input_ids"][:2] for side, text in zip(sides, rendered, strict=True)]
    twice = [start == 2 * [own.bos_token_id] for start, own in zip(starts, sides, strict=True)]
    if twice[0] == twice[1]:
        return []
    number = twice.index(True)
    token = sides[number].bos_token
    return [fact("tokenizers.twice_rendered", side=SIDES[number], token=token)]


def _excerpt(text: str, place: int) -> str:
    return shortened(text[max(0, place - 10) :], _EXCERPT)


def _quoted(text: str) -> str:
    return json.dumps(shortened(text, _EXCERPT), ensure_ascii=False)


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
