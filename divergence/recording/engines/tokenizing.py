"""From prompts to token ids, once; afterwards only the ids travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from divergence.errors import PromptError
from divergence.recording.options.prompts import Prompt
from divergence.run.schema.manifest import SampleTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["group_samples", "token_texts", "tokenize"]


def tokenize(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, *, chat: bool
) -> list[SampleTokens]:
    """Render and encode each prompt. Raises PromptError (no tokenizer, no template, no tokens)."""
    return [_tokenize(prompt, tokenizer, chat, number) for number, prompt in enumerate(prompts)]


def group_samples(samples: list[SampleTokens], *, batch: bool, pad_left: bool) -> list[list[int]]:
    """One group a sample, or one for all with the padding noted in the samples."""
    if not batch:
        return [[number] for number in range(len(samples))]
    longest = max(len(sample.prompt_ids) for sample in samples)
    for sample in samples:
        pads = longest - len(sample.prompt_ids)
        sample.num_left_pad, sample.num_right_pad = (pads, 0) if pad_left else (0, pads)
    return [list(range(len(samples)))]


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[str, str]:
    """Text of single tokens; the raw vocabulary entry where a token alone is no valid text."""
    if tokenizer is None:
        return {}
    texts = {}
    for token in sorted(set(ids)):
        try:
            text = tokenizer.decode([token])
            if not text or "\ufffd" in text:
                text = str(tokenizer.convert_ids_to_tokens(token))
        except Exception:  # an id beyond the tokenizer's own vocabulary, library by library
            continue
        texts[str(token)] = text
    return texts


def _tokenize(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, chat: bool, number: int
) -> SampleTokens:
    if prompt.input_ids is not None:
        return SampleTokens(prompt_ids=list(prompt.input_ids))
    if tokenizer is None:
        raise PromptError(
            f"prompt {number} is text, but the model has no usable tokenizer",
            hint='give token ids: --prompts FILE.jsonl with {"input_ids": [...]}',
        )
    messages = prompt.messages
    text, special = prompt.text, True
    if chat and messages is None:
        conversation = [{"role": "user", "content": text or ""}]
    elif messages is not None:
        conversation = [{"role": m.role, "content": m.content} for m in messages]
    else:
        conversation = None
    if conversation is not None:
        text, special = _render(tokenizer, conversation, number), False
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if not ids:
        raise PromptError(f"prompt {number} has no tokens: {text!r}")
    return SampleTokens(text=text, prompt_ids=ids)


def _render(tokenizer: Any, conversation: list[dict[str, str]], number: int) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError(
            f"prompt {number} is a chat, but the tokenizer has no chat template",
            hint="give plain text, or a model with a chat template",
        )
    try:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        return text
    except ImportError as error:
        raise PromptError(
            "chat templates need the jinja2 package", hint="pip install jinja2"
        ) from error
    except Exception as error:  # templates raise errors of their own
        raise PromptError(f"prompt {number}: the chat template failed: {error}") from error
