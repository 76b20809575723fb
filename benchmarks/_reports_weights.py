"""Reports of wrong weights, buffers and settings, and of rounding that was taken for a fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks._fault_patches import _replace
from benchmarks._reports import Case, Runs, prompts_of
from benchmarks._reports_kernels import _blocks, _window
from benchmarks._reports_models import make
from divergence import MachineOptions, RecordOptions, capture, truth

__all__ = ["WEIGHTS"]


# ── rotary tables ───────────────────────────────────────────────────────────────────────────────


def _frequencies(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(getattr(part, "inv_freq", None), torch.Tensor):
                part.inv_freq.data.copy_(change(part.inv_freq.data))

    return plant


def _other_base(frequencies: torch.Tensor) -> torch.Tensor:
    count = len(frequencies)
    return 1.0 / 1e4 ** (torch.arange(count, dtype=torch.float32) / count)


def _lost_from_prompt_four(model: nn.Module) -> None:
    """The rotary table is zeros for prompts whose first id is above 1000."""
    state = {"is_lost": False}

    def watch(healthy: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        ids = args[0] if ids is None else ids
        if ids.shape[1] > 1:
            state["is_lost"] = bool((ids[:, 0] > 1000).all())
        return healthy(*args, **kwargs)

    def wrong(healthy: Any, *args: Any, **kwargs: Any) -> Any:
        tables = healthy(*args, **kwargs)
        return tuple(table * 0 for table in tables) if state["is_lost"] else tables

    _replace(model.model, watch)
    _replace(model.model.rotary_emb, wrong)


# ── parameters ──────────────────────────────────────────────────────────────────────────────────


def _halves(weight: torch.Tensor, head: int) -> torch.Tensor:
    """Rows of each head from (0, 1, 2, 3, …) to (0, 2, …, 1, 3, …)."""
    rows = weight.view(-1, head // 2, 2, weight.shape[-1])
    return rows.transpose(1, 2).reshape(weight.shape)


def _permuted(model: nn.Module) -> None:
    for block in _blocks(model):
        for part in (block.self_attn.q_proj, block.self_attn.k_proj):
            part.weight.data = _halves(part.weight.data, block.self_attn.head_dim)


def _tied(model: nn.Module) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def _centred_weights(model: nn.Module) -> None:
    head = model.lm_head
    head.weight.data -= head.weight.data.mean(0, keepdim=True)


def _centred_logits(model: nn.Module) -> None:
    def wrong(healthy: Any, x: torch.Tensor) -> torch.Tensor:
        logits = healthy(x)
        return logits - logits.mean(-1, keepdim=True)

    _replace(model.lm_head, wrong)


def _parameters(
    ending: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(ending):
                parameter.data = change(parameter.data)

    return plant


def _four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 in 15 levels."""
    blocks = weight.float().view(-1, 32)
    step = blocks.abs().amax(1, keepdim=True) / 7
    return ((blocks / step).round() * step).view(weight.shape).to(weight.dtype)


def _merged_in_bfloat16(model: nn.Module) -> None:
    """Another order of roundings: W + BA is rounded twice, so a part of the values is another."""
    generator = torch.Generator().manual_seed(1)
    for block in _blocks(model):
        weight = block.self_attn.q_proj.weight
        update = torch.randn(weight.shape, generator=generator) * 2e-4
        kept = (weight.data.float() + update).bfloat16() - update.bfloat16()
        weight.data = kept.to(weight.dtype)


# ── runs that are no capture of one folder ──────────────────────────────────────────────────────


def _without_head(case: Case, folder: Path) -> Runs:
    """B's checkpoint lacks the head, which is freshly initialised."""
    model = make(case.model, folder / "model")
    shutil.copytree(model, folder / "other")
    file = folder / "other" / "model.safetensors"
    values = load_file(file)
    values.pop("lm_head.weight")
    save_file(values, file, {"format": "pt"})
    capture(
        model,
        out=folder / "a",
        prompts=prompts_of(case),
        max_new_tokens=case.new_tokens,
        dtype=case.dtype,
        machine=MachineOptions(probe=False),
    )
    capture(
        like=folder / "a",
        out=folder / "b",
        model=folder / "other",
        machine=MachineOptions(probe=False),
    )
    return Runs(folder / "a", folder / "b")


def _other_classifier(case: Case, folder: Path) -> Runs:
    """One backbone; the head of classes has another seed."""
    make(case.model, folder / "model")
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder / "model", num_labels=3
        ).eval()
        model.score.weight.data.normal_(0, 0.1)
        capture(model, out=folder / name, inputs=[{"input_ids": torch.tensor(prompts_of(case))}])
    return Runs(folder / "a", folder / "b", is_localized=False)


def _packed(case: Case, folder: Path) -> Runs:
    """Two documents in one row; B's attention takes no mask but the causal one."""
    make(case.model, folder / "model")
    ids = torch.tensor(prompts_of(case))
    length, first = ids.shape[1], ids.shape[1] // 2
    number = torch.arange(length)
    seen = (number[None] <= number[:, None]) & (
        (number[None] >= first) == (number[:, None] >= first)
    )
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (number % first)[None],
        "use_cache": False,
    }
    for name in ("a", "b"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", attn_implementation="eager"
        ).eval()
        if name == "b":
            _window(length)(model)
        capture(model, out=folder / name, inputs=[inputs])
    return Runs(folder / "a", folder / "b", is_localized=False)


def _whole(case: Case, folder: Path) -> Runs:
    """One run: its decode steps against one forward over all tokens."""
    model = make(case.model, folder / "model")
    capture(
        model,
        out=folder / "a",
        prompts=prompts_of(case),
        max_new_tokens=case.new_tokens,
        dtype=case.dtype,
        recording=RecordOptions(whole=True),
        machine=MachineOptions(probe=False),
    )
    return Runs(folder / "a", None, is_localized=False)


def _overflowing(case: Case, folder: Path) -> Runs:
    """Block 2 puts more than 65504 on the residual stream. A is bfloat16, B float16."""
    model = make(case.model, folder / "model")
    file = model / "model.safetensors"
    values = load_file(file)
    for part in ("up_proj", "down_proj"):
        values[f"model.layers.2.mlp.{part}.weight"] *= 400
    save_file(values, file, {"format": "pt"})
    capture(
        model,
        out=folder / "a",
        prompts=prompts_of(case),
        max_new_tokens=case.new_tokens,
        dtype="bfloat16",
        machine=MachineOptions(probe=False),
    )
    truth(folder / "a", out=folder / "truth")
    capture(
        like=folder / "a", out=folder / "b", dtype="float16", machine=MachineOptions(probe=False)
    )
    return Runs(folder / "a", folder / "b", folder / "truth")


def _config_of_an_older_version(case: Case, folder: Path) -> Runs:
    """B's config lacks what scales the rotary angles."""
    model = make(case.model, folder / "model")
    shutil.copytree(model, folder / "other")
    file = folder / "other" / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    file.write_text(json.dumps(config))
    capture(
        model,
        out=folder / "a",
        prompts=prompts_of(case),
        max_new_tokens=case.new_tokens,
        dtype=case.dtype,
        machine=MachineOptions(probe=False),
    )
    truth(folder / "a", out=folder / "truth")
    capture(
        like=folder / "a",
        out=folder / "b",
        model=folder / "other",
        machine=MachineOptions(probe=False),
    )
    return Runs(folder / "a", folder / "b", folder / "truth")


# ── the cases ───────────────────────────────────────────────────────────────────────────────────


def _cases() -> Iterator[Case]:
    buffers = {
        "report": "huggingface/transformers#45902, #48892, unslothai/unsloth#4112",
        "letter": "W",
        "cause": "the rotary frequencies, no part of the checkpoint, are lost on loading",
        "place": "rotary",
        "words": (("the frequencies", "inv_freq|rotary"),),
    }
    lost: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "zeros": torch.zeros_like,
        "garbage": lambda old: torch.full_like(old, 3e-39),
    }
    for name, change in lost.items():
        yield Case(name=f"lost-buffer-{name}", **buffers, plant=_frequencies(change))
    yield Case(
        name="lost-buffer-gpt-neox",
        **buffers,
        model="gpt-neox",
        dtype="bfloat16",
        plant=_frequencies(torch.zeros_like),
    )
    base = {
        "report": "vllm-project/vllm#42624, #44158, sgl-project/sglang#14745",
        "letter": "S",
        "place": "rotary",
        "words": (("the rotary angles", "rope|inv_freq|rotary"),),
    }
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"rope-theta-{dtype}",
            **base,
            cause="rope_theta falls back to 10000",
            model="llama-theta",
            dtype=dtype,
            lengths=(40,),
            plant=_frequencies(_other_base),
        )
    yield Case(
        name="rope-scaling",
        **base,
        cause="the scaling of the rotary angles is dropped",
        model="llama-scaled",
        lengths=(40,),
        side=None,  # two configurations: no run tells which is meant
        runs=_config_of_an_older_version,
    )
    other = {"kinds": ("incomparable",), "side": None}
    yield Case(
        name="rotary-rows",
        report="jzhang38/TinyLlama#24",
        letter="W",
        **other,
        cause="rows of q_proj and k_proj are in the other rotary layout",
        plant=_permuted,
        # A permutation is an order of the same rows: either word tells what to do about it.
        words=(("that rows are permuted", "permut|rows in another order"), "q_proj", "k_proj"),
    )
    yield Case(
        name="centred-head",
        report="TransformerLensOrg/TransformerLens#693",
        letter="R",
        cause="the unembedding is centred: one constant a token, equal probabilities",
        plant=_centred_weights,
        **other,
        words=("lm_head", ("that probabilities are equal", "constant|shift|probabilit")),
    )
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"centred-logits-{dtype}",
            report="TransformerLensOrg/TransformerLens#693",
            letter="R",
            cause="logits are centred: one constant a token, equal probabilities",
            dtype=dtype,
            plant=_centred_logits,
            kinds=("within_floor",),
            side="neither",
            words=(("that probabilities are equal", "constant|shift|probabilit"),),
        )
    tied = "huggingface/transformers#42612, vllm-project/vllm#51063, #53170"
    yield Case(
        name="tied-by-config",
        report=tied,
        letter="W",
        plant=_tied,
        **other,
        cause="the loader ties a head that the checkpoint holds",
        words=("lm_head", "embed_tokens", ("that they are tied", "tied|equals")),
    )
    yield Case(
        name="head-not-saved",
        report="huggingface/peft#2289, #876",
        letter="W",
        **other,
        cause="the head is not in the checkpoint and is freshly initialised",
        runs=_without_head,
        words=("lm_head", ("that it is freshly initialised", "initiali|lack|missing")),
    )
    yield Case(
        name="classifier-not-saved",
        report="huggingface/peft#602",
        letter="W",
        **other,
        cause="the head of classes is freshly initialised",
        runs=_other_classifier,
        words=("score",),
    )
    for count, first in (("later", 4), ("all", 0)):
        starts = [1001 + n if n >= first else 5 + n for n in range(8)]
        yield Case(
            name=f"sleep-{count}",
            letter="W",
            report="vllm-project/vllm#16564, #29341, #54235",
            cause="after sleep and wake the rotary table is zeros, "
            + ("from prompt 4 on" if first else "from the first prompt on"),
            prompts=tuple((start, *range(20, 33)) for start in starts),
            new_tokens=2,
            plant=_lost_from_prompt_four,
            place="rotary",
            unit=f"prompt {first},",
            words=(("from prompt 4 on", r"prompts? 4\b"),) if first else ("rotary",),
        )
    state = {"report": "ml-explore/mlx-lm#565", "letter": "W", "model": "mamba"}
    yield Case(
        name="a-log-rounded",
        **state,
        cause="A_log is held in bfloat16",
        **other,
        plant=_parameters("A_log", lambda old: old.bfloat16().float()),
        words=("A_log", ("that it is rounded to bfloat16", "bfloat16|rounded")),
    )
    yield Case(
        name="a-log-wide",
        **state,
        cause="A_log is held in float32, with equal values",
        dtype="bfloat16",
        plant=_parameters("A_log", torch.Tensor.float),
        words=("A_log",),
        kinds=("within_floor", "identical"),
        side="neither",
    )
    merged = "huggingface/peft#2321, #1043, QwenLM/Qwen#1168"
    yield Case(
        name="merge-four-bits",
        report=merged,
        letter="W",
        **other,
        cause="merging an adapter quantises the weights to 4 bits again",
        plant=_parameters("q_proj.weight", _four_bits),
        words=("q_proj", ("that it is quantised", "quanti|levels|4 bits")),
    )
    yield Case(
        name="merge-bfloat16",
        report=merged,
        letter="R",
        dtype="bfloat16",
        **other,
        cause="merging an adapter in bfloat16 rounds in another order",
        plant=_merged_in_bfloat16,
        words=("q_proj", ("that it is rounding", "round|last bit|units")),
    )
    yield Case(
        name="float16-overflow",
        report="QwenLM/Qwen3#761, huggingface/transformers#33312",
        letter="S",
        cause="a model trained in bfloat16 overflows in float16",
        runs=_overflowing,
        kinds=("nonfinite",),
        place=r"layers\.2\b",
        words=("float16",),
    )
    healthy = {"kinds": ("within_floor", "identical"), "side": "neither", "letter": "R"}
    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"batch-{dtype}",
            report="verl-project/verl#6280, #1381, #2996",
            **healthy,
            cause="micro-batches of another size: other kernels",
            dtype=dtype,
            lengths=(24, 20, 16, 12, 9, 7, 5, 3),
            other={"batch": True},
        )
    cache = "huggingface/transformers#25420, #26344, #36536, ggml-org/llama.cpp#4479"
    for model, dtype in (("llama", "bfloat16"), ("qwen3", "float32")):
        yield Case(
            name=f"no-cache-{model}-{dtype}",
            report=cache,
            **healthy,
            model=model,
            dtype=dtype,
            cause="without a cache other kernels run",
            other={"use_cache": False},
            new_tokens=6,
        )
    yield Case(
        name="whole-sequence",
        report=cache,
        **healthy,
        dtype="bfloat16",
        runs=_whole,
        cause="one forward over the sequence against its steps",
        new_tokens=6,
    )
    yield Case(
        name="packed",
        report="alex-hh/profam#495, huggingface/nanoVLM#204",
        letter="C",
        cause="packed documents see each other: the kernel takes no mask of documents",
        runs=_packed,
        place=r"layers\.0\b",
        side=None,
        words=(("from which token on", r"token (1[2-9]|2\d)"),),
    )


WEIGHTS: tuple[Case, ...] = tuple(_cases())
