"""A tiny random Llama, for the demo and the selftest.

``build`` writes a complete Hugging Face folder (config, safetensors weights, tokenizer, chat
template) that ``AutoModel*`` and ``AutoTokenizer`` load offline. It writes the Hub's own names and
shapes, without importing transformers: the same folder serves every release of it.

*Lively.* The default initialisation of transformers (std 0.02) gives a model in which nothing
happens: blocks add next to nothing, attention is uniform, logits are flat, and a fault planted in
it is found or missed for the wrong reasons. Each matrix is scaled by what flows through it instead:

    residual stream   unit rms at the embedding; each sublayer adds rms ``update`` to it, so the
                      relative update falls from about 1 to 0.3 with depth, as in trained models
    attention scores  std 2 before the softmax: peaked, not one-hot
    logits            std 3: the gap top1 - top2 is about 3 / sqrt(2 ln V), near 0.8, often a tie
    norm weights      1 ± 0.25, so that leaving one out is seen
    sink              the first token, <|bos|>, carries two massive channels, 15 to 20 times the
                      norm of the others (not where embeddings are tied)

Tied embeddings start smaller (their std serves the logits) and the updates are twice as large as
they, so the first block overwrites most of them; else each token would predict itself.

*Reproducible.* All noise is the sum of four 16-bit pieces of PCG64's raw output, whose stream NumPy
guarantees: near-normal (excess kurtosis -0.3), exact integers, no exp or log, so no bit depends on
libm, the instruction set or torch's generators. One multiplication, one addition and one rounding
to the dtype follow, each correctly rounded by IEEE 754. A weight depends on the seed, its name and
its shape alone.

It refuses to be a benchmark of quality: the model knows nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from divergence.errors import RunExistsError
from divergence.output import output_folder, write_output

Dtype = Literal["bfloat16", "float16", "float32"]
Size = Literal["test", "demo"]
Wrap = Literal["none", "bos", "eos", "both"]

_SPECIAL = ("<|pad|>", "<|eos|>", "<|bos|>", "<|mask|>", "<|im_start|>", "<|im_end|>")
PAD, _EOS, _BOS, _MASK = range(4)
"""Token ids. T5 wants pad 0 and eos 1; the others do not care."""

NUM_SPECIAL = len(_SPECIAL)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LOGIT_STD = 3.0
SCORE_STD = 2.0
NORM_STD = 0.25
_SINK = 20.0
"""Norm of the sink token over the norm that the others reach at the last block."""
ATTENDED_RMS = 0.55
"""Rms of a softmax average of unit values at that score std: measured, 0.43-0.75."""
_SWIGLU_RMS = 0.60
"""sqrt(E[silu(g)^2] E[u^2]) for unit normals."""
MAX_POSITIONS = 512
_CONFIG = "config.json"
_FILES = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
"""What a build that was stopped may have left: the config is written last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that a checkpoint is built from."""

    num_blocks: int
    """Number of repeated blocks."""
    hidden: int
    """Length of a token's row."""
    num_heads: int
    num_kv_heads: int
    vocab: int
    tied: bool = False
    """The output matrix is the input embedding."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def mlp(self) -> int:
        return 3 * self.hidden

    @property
    def head_std(self) -> float:
        """Return the std of a row of the output matrix: a normed state times it has std
        ``LOGIT_STD``."""
        return LOGIT_STD / math.sqrt(self.hidden)


SIZES: dict[str, Shape] = {
    "test": Shape(num_blocks=3, hidden=64, num_heads=4, num_kv_heads=2, vocab=512),
    "demo": Shape(num_blocks=12, hidden=256, num_heads=8, num_kv_heads=4, vocab=2048),
}


class Checkpoint:
    """Tensors by name, drawn one by one."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tensors: dict[str, np.ndarray] = {}

    def draw(self, name: str, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        """Near-normal float64 noise, stored and returned."""
        generator = np.random.PCG64([self.seed, *name.encode()])
        raw = generator.random_raw(math.prod(shape)).astype("<u8", copy=False)
        total = raw.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
        # The sum of four uniforms on 0..65535: mean 131070, variance 65536^2 / 3 up to 2^-32.
        noise = (total - 131070) * (std * math.sqrt(3) / 65536) + mean
        return self.tensors.setdefault(name, noise.reshape(shape))

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """(out, in): unit inputs give outputs of std ``gain``."""
        self.draw(name + ".weight", rows, columns, std=gain / math.sqrt(columns))

    def norm(self, name: str, size: int, *, mean: float = 1.0, shift: float = 0.0) -> None:
        """Weights about ``mean``; ``shift`` where the model adds a constant to what is stored."""
        self.draw(name + ".weight", size, std=NORM_STD * mean, mean=mean - shift)

    def head(self, name: str, shape: Shape) -> None:
        """Output rows. Special tokens are kept small, so that greedy text does not stop at once."""
        rows = self.draw(name + ".weight", shape.vocab, shape.hidden, std=shape.head_std)
        rows[:NUM_SPECIAL] *= 0.25

    def save(self, path: Path, dtype: Dtype) -> None:
        tensors = {
            # float64 -> float32 -> dtype: two roundings, the same ones everywhere.
            name: torch.from_numpy(value.astype(np.float32)).to(getattr(torch, dtype))
            for name, value in self.tensors.items()
        }
        write_output(save(tensors, {"format": "pt"}), path, what="model")


def embedding(at: Checkpoint, name: str, shape: Shape, *, head: str, updates: int) -> float:
    """Input and output embeddings; returns the rms that each of ``updates`` sublayers is to add."""
    if shape.tied:
        at.head(name, shape)
        return 2.0 * shape.head_std
    update = 0.7
    rows = at.draw(name + ".weight", shape.vocab, shape.hidden, std=1.0)
    final_norm = math.sqrt(shape.hidden * (1 + updates * update**2))
    channels = (shape.hidden // 5, shape.hidden // 2)
    rows[_BOS, channels] = np.array([1.0, -1.0]) * _SINK * final_norm / math.sqrt(2)
    at.head(head, shape)
    return update


def swiglu(at: Checkpoint, path: str, shape: Shape, *, size: int, out: float, names: str) -> None:
    """``names``: of the gate, up and down matrices; ``out``: the rms of what they give."""
    gate, up, down = (f"{path}.{name}" for name in names.split())
    at.linear(gate, size, shape.hidden)
    at.linear(up, size, shape.hidden)
    at.linear(down, shape.hidden, size, gain=out / _SWIGLU_RMS)


def _llama(at: Checkpoint, shape: Shape) -> None:
    """Pre-norm, rotary, grouped heads."""
    gain = math.sqrt(SCORE_STD)
    update = embedding(
        at, "model.embed_tokens", shape, head="lm_head", updates=2 * shape.num_blocks
    )
    q, kv = (count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads))
    for block in range(shape.num_blocks):
        path = f"model.layers.{block}"
        at.norm(f"{path}.input_layernorm", shape.hidden)
        at.linear(f"{path}.self_attn.q_proj", q, shape.hidden, gain=gain)
        at.linear(f"{path}.self_attn.k_proj", kv, shape.hidden, gain=gain)
        at.linear(f"{path}.self_attn.v_proj", kv, shape.hidden)
        at.linear(f"{path}.self_attn.o_proj", shape.hidden, q, gain=update / ATTENDED_RMS)
        at.norm(f"{path}.post_attention_layernorm", shape.hidden)
        names = "gate_proj up_proj down_proj"
        swiglu(at, f"{path}.mlp", shape, size=shape.mlp, out=update, names=names)
    at.norm("model.norm", shape.hidden)


def grouped_dimensions(shape: Shape) -> dict[str, Any]:
    """Sizes for config.json, as decoders with grouped heads call them."""
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_blocks,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": MAX_POSITIONS,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Says how a model of one architecture is written."""

    model_type: str
    """As config.json names the architecture."""
    model_class: str
    weights: Callable[[Checkpoint, Shape], None]
    """Fills a checkpoint."""
    dimensions: Callable[[Shape], dict[str, Any]]
    """The part of config.json that states sizes, in the architecture's own words."""
    wrap: Wrap = "none"
    """Which special tokens the tokenizer puts around a text."""
    tied: bool = False
    """Is the output matrix of its own checkpoints the input embedding?"""


LLAMA = Architecture(
    model_type="llama",
    model_class="LlamaForCausalLM",
    weights=_llama,
    dimensions=grouped_dimensions,
    wrap="bos",
)


def build(
    directory: str | Path,
    *,
    architecture: Architecture = LLAMA,
    size: Size = "test",
    seed: int = 0,
    dtype: Dtype = "bfloat16",
    num_blocks: int | None = None,
    hidden: int | None = None,
    tied: bool | None = None,
    chat_template: bool = True,
) -> Path:
    """Write a model folder and return its path; ``directory`` must be empty or absent, or
    hold what a build that was stopped has left.

    ``size``: "test" (3 blocks, hidden 64, vocabulary 512) or "demo" (12 blocks, hidden 256,
    vocabulary 2048); ``num_blocks`` and ``hidden``, a multiple of twice the heads, replace its
    values. ``tied``: whether the output matrix is the input embedding; None takes what the
    architecture's own checkpoints do.
    """
    directory = Path(directory)
    shape = replace(
        SIZES[size],
        num_blocks=num_blocks or SIZES[size].num_blocks,
        hidden=hidden or SIZES[size].hidden,
        tied=architecture.tied if tied is None else tied,
    )
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    if any(name not in _FILES and not name.endswith(".tmp") for name in names):
        raise RunExistsError(
            "the folder for the model is not empty",
            where=str(directory),
            hint="name a new folder, or remove this one",
        )
    output_folder(directory, what="model")

    checkpoint = Checkpoint(seed)
    architecture.weights(checkpoint, shape)
    checkpoint.save(directory / "model.safetensors", dtype)
    _write_tokenizer(
        directory, vocab_size=shape.vocab, wrap=architecture.wrap, chat_template=chat_template
    )
    tokens = {"pad_token_id": PAD, "bos_token_id": _BOS, "eos_token_id": _EOS}
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        **tokens,
        **architecture.dimensions(shape),
    }
    _write_json(directory / "generation_config.json", {"do_sample": False, **tokens})
    _write_json(directory / _CONFIG, config)
    return directory


def _write_tokenizer(directory: Path, *, vocab_size: int, wrap: Wrap, chat_template: bool) -> None:
    """Train byte-level BPE on tiny.txt, to exactly ``vocab_size`` tokens, and write it.

    Byte-level, so any text survives the round trip, and trained, so that words fall into pieces of
    uneven length as in a real model. The trainer breaks ties by token id, which makes the result
    the same on every machine for one version of the ``tokenizers`` library.
    """
    text = Path(__file__).with_name("tiny.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"a vocabulary of {vocab_size} does not fit the text: "
            f"it gives {tokenizer.get_vocab_size()} tokens"
        )
    if wrap != "none":
        before = f"{_SPECIAL[_BOS]} " if wrap in ("bos", "both") else ""
        after = f" {_SPECIAL[_EOS]}" if wrap in ("eos", "both") else ""
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}",
            special_tokens=[(_SPECIAL[token], token) for token in (_BOS, _EOS)],
        )
    write_output(tokenizer.to_str(), directory / "tokenizer.json", what="tokenizer")
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[PAD],
        "bos_token": _SPECIAL[_BOS],
        "eos_token": _SPECIAL[_EOS],
        "mask_token": _SPECIAL[_MASK],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 512,
    }
    if chat_template:
        settings["chat_template"] = _CHAT_TEMPLATE
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_output(json.dumps(content, indent=2, sort_keys=True) + "\n", path, what="model")
