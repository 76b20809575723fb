"""Running one group of prompts: greedy decoding with the KV cache, or one forward.

Decoding goes through transformers' own ``generate``, which knows each architecture's caches and
inputs; a logits processor takes the argmax or forces a recorded token. The model's generation
config (sampling, penalties, stop words) is left out on purpose: it belongs to the deployment, and
would hide what the forward pass computes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from divergence.errors import ModelError
from divergence.recording.engines.load import LoadedModel
from divergence.recording.hooks.patch import patched
from divergence.recording.machine.hardware import free_bytes
from divergence.recording.ranks.processes import Ranks
from divergence.run.schema.manifest import SampleTokens

__all__ = [
    "GroupResult", "can_generate", "check_ids", "choices", "control", "ends_of", "failures",
    "generate", "inputs", "pad_id", "padded_right", "run_group",
]  # fmt: skip

_TOP = 5
_KEEP, _POSITIONS = "logits_to_keep", "position_ids"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The tokens of a group of samples, one list for each sample."""

    generated: list[list[int]]
    """Ids that were fed forward, or chosen last."""
    chosen: list[list[int]]
    """The greedy choice at each step."""
    decoder_prompt: list[list[int]]
    """What an encoder-decoder's decoder began with."""
    seen_ids: set[int] = field(default_factory=set)
    """Every id that a report may want to show as text: choices and top-5."""


def run_group(
    loaded: LoadedModel,
    samples: list[SampleTokens],
    *,
    max_new_tokens: int,
    forced: list[list[int]] | None = None,
    num_logits: int | None = None,
) -> GroupResult:
    """One forward for each generated token over a group of equally long (padded) prompts.

    ``forced``: the tokens to feed instead of the own choice, equally many for each sample.
    ``num_logits``: of how many last positions the prefill computes logits; None leaves it to the
    model, and so does a model that cannot be asked.
    Raises ModelError when the forward itself fails.
    """
    ids, mask = inputs(loaded, samples)
    count = max_new_tokens if forced is None else len(forced[0])
    model: Any = loaded.module
    if loaded.ranks is not None:
        loaded.ranks.idle = False
    with failures(loaded, samples, count), torch.no_grad():
        if padded_right(loaded, samples):
            return _prefill(loaded, samples, ids, mask, forced if count else [[] for _ in samples])
        if loaded.task != "encoder" and count > 0 and can_generate(model):
            ends = ends_of(loaded, forced)
            made = control(forced, count, ends, loaded.ranks)
            output = generate(
                loaded, ids, mask, count, ends=ends, control=made, num_logits=num_logits
            )
            before, fed = output.tensor_split([output.shape[1] - len(made.chosen)], dim=1)
            generated = fed.tolist()
            decoder = loaded.task == "encoder-decoder"
            begun: list[list[int]] = before.tolist() if decoder else [[] for _ in generated]
            return GroupResult(generated, choices(made, generated, ends), begun, made.seen)
        kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        prompt: list[list[int]] = [[] for _ in samples]
        if loaded.task == "encoder-decoder":
            prompt = [[_decoder_start(model)] for _ in samples]
            kwargs["decoder_input_ids"] = torch.tensor(prompt, device=ids.device)
        model(**kwargs)
        return GroupResult([[] for _ in samples], [[] for _ in samples], prompt)


def padded_right(loaded: LoadedModel, samples: Sequence[SampleTokens]) -> bool:
    """Are there pads behind the prompts of a causal language model? Only its prefill is made then:
    a token behind the pads would not follow its prompt in a cache or a state."""
    return loaded.task == "causal-lm" and any(sample.num_right_pad for sample in samples)


def _prefill(
    loaded: LoadedModel,
    samples: list[SampleTokens],
    ids: torch.Tensor,
    mask: torch.Tensor,
    forced: list[list[int]] | None,
) -> GroupResult:
    """One forward over prompts (B, T) with pads behind them. Like those of any prefill its logits
    are (B, 1, V): the head gets the last token of each prompt."""
    model: Any = loaded.module
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"pads behind a prompt: {type(model).__name__} does not say which module gives its "
            "logits, which are to be those of each prompt's last token",
            hint="--pad-left",
        )
    ends = [sample.num_left_pad + len(sample.prompt_ids) - 1 for sample in samples]
    rows = range(len(samples))

    def deciding(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0][rows, ends][:, None], *args[1:]  # (B, T, H) → (B, 1, H)

    known = inspect.signature(model.forward).parameters
    more = {_POSITIONS: mask.cumsum(-1).sub(1).clamp(min=0)} if _POSITIONS in known else {}
    with head.register_forward_pre_hook(deciding, prepend=True):  # before what records it
        logits = model(input_ids=ids, attention_mask=mask, **more).logits
    made = control(forced, 1, set(), loaded.ranks)
    fed: list[list[int]] = [[] for _ in samples]
    if forced is None or forced[0]:
        scores = made(ids, logits[:, -1].float())
        fed = scores.argmax(dim=-1, keepdim=True).tolist()
    return GroupResult(fed, choices(made, fed, set()), [[] for _ in samples], made.seen)


@contextlib.contextmanager
def failures(loaded: LoadedModel, samples: Sequence[SampleTokens], count: int) -> Iterator[None]:
    """What a forward raises, as ModelError; ``count`` tokens were to follow each sample."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"out of memory on {loaded.device} during the forward pass",
            hint="shorter prompts, --device-map auto, or a smaller --dtype",
        ) from error
    except NotImplementedError as error:
        raise ModelError(
            f"the forward pass needs an operator that {loaded.device} lacks: "
            f"{(str(error).splitlines() or ['?'])[0][:200]}",
            hint="use --device cpu, or a newer torch for this device",
        ) from error
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
        RuntimeError,
    ) as error:  # fmt: skip
        length = max(len(sample.prompt_ids) for sample in samples)
        config: Any = loaded.module.config
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        hint = None
        if "dtype" in str(error) or "scalar type" in str(error):
            hint = "the model's own code mixes dtypes: --dtype float32"
        if limit is not None and 0 <= limit < length + count:  # XLNet has -1: no limit
            hint = (
                f"the prompt has {length} tokens and {count} are to follow; "
                f"the model has {limit} positions"
            )
        raise ModelError(
            f"the forward pass failed: {(str(error).splitlines() or ['?'])[0][:300]}", hint=hint
        ) from error


def check_ids(loaded: LoadedModel, samples: Sequence[SampleTokens], *, itemsize: int = 4) -> None:
    """Raise ModelError for a token id, of a prompt or forced, that the model does not have, and for
    a prompt whose attention the host has no memory for: the system would end the process.
    ``itemsize``: bytes of a number that it computes with."""
    config: Any = loaded.module.config
    vocab = getattr(config.get_text_config(), "vocab_size", None)
    if loaded.device.type == "cpu" and getattr(config, "_attn_implementation", "") == "eager":
        length = max((len(sample.prompt_ids) for sample in samples), default=0)
        heads = getattr(config.get_text_config(), "num_attention_heads", None) or 1
        # scores and what softmax makes of them
        needed, free = 2 * itemsize * heads * length**2, free_bytes(loaded.device)
        if 0 < free < needed:
            raise ModelError(
                f"a prompt of {length:,} tokens needs {needed / 2**30:,.1f} GiB for the attention "
                f"of a block, and {free / 2**30:,.1f} GiB are free",
                hint="a shorter prompt, or --attn-implementation sdpa",
            )
    for number, sample in enumerate(samples):
        top = max((*sample.prompt_ids, *sample.generated_ids), default=0)
        if vocab is not None and top >= vocab:
            raise ModelError(
                f"prompt {number}: token id {top} is outside the model's vocabulary of {vocab}",
                hint="the prompt ids or the tokenizer belong to another model",
            )


def ends_of(loaded: LoadedModel, forced: list[list[int]] | None) -> set[int]:
    """The tokens after which a sample has ended; none where tokens are forced."""
    model: Any = loaded.module
    eos = model.generation_config.eos_token_id if forced is None else None
    return {eos} if isinstance(eos, int) else set(eos or ())


def choices(control: Any, generated: list[list[int]], ends: set[int]) -> list[list[int]]:
    """What ``control`` chose of each sample, to whom the ``generated`` tokens were fed."""
    chosen = [list(row) for row in zip(*control.chosen, strict=True)]
    for row, fed in zip(chosen, generated, strict=True):
        # A sample that has ended is fed padding while its batch goes on: no choice any more.
        last = next((place for place, token in enumerate(fed) if token in ends), len(fed))
        del row[last + 1 :]
    return chosen


def generate(
    loaded: LoadedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    count: int,
    *,
    control: Any = None,
    ends: Collection[int] = (),
    num_logits: int | None = None,
    with_cache: bool = False,
    cache: Any = None,
) -> Any:
    """transformers' own result for ``count`` more tokens, which ``control`` may choose: the ids, or
    what holds the cache too (``past_key_values``). ``cache``: of the first ``ids``, which are not
    fed again."""
    from transformers import GenerationConfig, LogitsProcessorList

    model: Any = loaded.module
    own, pad = model.generation_config, pad_id(loaded)
    plain = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=count,
        use_cache=loaded.forwards.cached,
        prefill_chunk_size=loaded.forwards.chunk,
        return_dict_in_generate=with_cache,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    known = inspect.signature(model.forward).parameters
    more = {} if num_logits is None or _KEEP not in known else {_KEEP: num_logits}
    with patched(model, "generation_config", plain):  # generate() fills gaps from there
        return model.generate(
            inputs=ids,
            attention_mask=mask,
            generation_config=plain,
            logits_processor=LogitsProcessorList([] if control is None else [control]),
            **more,
            **({} if cache is None else {"past_key_values": cache}),
        )


def control(forced: list[list[int]] | None, count: int, ends: set[int], ranks: Ranks | None) -> Any:
    """A logits processor: notes the greedy choice, and forces the recorded one if there is one.

    Of ``ranks`` with the same prompts one chooses. After ``count`` steps, or when each row has met
    one of ``ends``, this rank is done, and runs on only for the others.
    """
    from transformers import LogitsProcessor

    class Control(LogitsProcessor):
        def __init__(self) -> None:
            self.chosen: list[list[int]] = []
            self.seen: set[int] = set()
            self._open: set[int] | None = None

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            step = len(self.chosen)
            # On ties the lowest id: argmax does not promise it on every device.
            best = scores.amax(dim=-1, keepdim=True)
            index = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
            choice = torch.where(scores == best, index, scores.shape[-1]).amin(dim=-1)
            choice = choice.clamp_max(scores.shape[-1] - 1)  # a row of nan has no best
            if ranks is not None:
                choice = torch.tensor(ranks.agree(choice.tolist()), device=scores.device)
            self.chosen.append(choice.tolist())
            self.seen.update(scores.topk(min(_TOP, scores.shape[-1])).indices.flatten().tolist())
            if forced is not None:
                choice = torch.tensor([row[step] for row in forced], device=scores.device)
            self.seen.update(choice.tolist())
            if ranks is not None:
                rows = self._open if self._open is not None else set(range(len(scores)))
                self._open = {row for row in rows if int(choice[row]) not in ends}
                if not self._open or len(self.chosen) == count:
                    ranks.idle = True
            out = torch.full_like(scores, float("-inf"))
            return out.scatter_(1, choice[:, None], 0.0)

    return Control()


def inputs(loaded: LoadedModel, samples: list[SampleTokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both (B, T), padded as the samples say."""
    pad, ids, mask = pad_id(loaded), [], []
    for sample in samples:
        left, right = sample.num_left_pad, sample.num_right_pad
        ids.append([pad] * left + sample.prompt_ids + [pad] * right)
        mask.append([0] * left + [1] * len(sample.prompt_ids) + [0] * right)
    return torch.tensor(ids, device=loaded.device), torch.tensor(mask, device=loaded.device)


def pad_id(loaded: LoadedModel) -> int:
    """Padding, or any stand-in: padded positions are masked."""
    own = getattr(loaded.module, "generation_config", None)
    for owner, name in (
        (own, "pad_token_id"), (loaded.tokenizer, "pad_token_id"), (own, "eos_token_id")
    ):  # fmt: skip
        value = getattr(owner, name, None)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0


def can_generate(model: Any) -> bool:
    check: Callable[[], bool] | None = getattr(model, "can_generate", None)
    return bool(check and check() and getattr(model, "generation_config", None) is not None)


def _decoder_start(model: Any) -> int:
    for owner in (getattr(model, "generation_config", None), model.config):
        value = getattr(owner, "decoder_start_token_id", None)
        if value is not None:
            return int(value)
    return 0
