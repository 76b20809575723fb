"""Cases of benchmarks/trust.py about silent passes: what `check` lets through as it is shipped.

Faults outside the blocks, other architectures, integers and masks, nan and inf."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks._trust import (
    BLOCK,
    Bench,
    Case,
    Told,
    abstained,
    checks,
    finds,
    refuses,
    right,
    said,
    wrong,
)
from divergence import compare
from divergence.recording.plant import Plant

__all__ = ["CASES"]


def _planted(bench: Bench, fault: str, **values: Any) -> Told:
    a = bench.reference(tokens=4)
    return checks(bench, a, bench.capture(like=a, plants=[fault], **values))


# ── outside the blocks ──────────────────────────────────────────────────────────────────────────


def _disturbed(bench: Bench, path: str, size: float, **values: Any) -> Told:
    """Code before a module adds noise to what it gets; recorded inputs take its place, so that no
    anchored pass shows it. The same noise in every forward, ``size`` times the rms."""

    def noisy(_: Any, args: tuple[torch.Tensor, ...], kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[1]))
        out = x + (size * x.float().square().mean().sqrt() * noise).to(x.dtype)
        return ((out, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": out})

    def prepare(model: Any) -> None:
        model.get_submodule(path).register_forward_pre_hook(noisy, with_kwargs=True)

    a = bench.reference(tokens=4)
    return checks(bench, a, bench.capture(like=a, prepare=prepare, **values))


def code_before_final_norm(bench: Bench) -> Told:
    """Code between the last block and the final norm that adds ten times the stream fails."""
    return _disturbed(bench, "model.norm", 10.0)


def code_before_final_norm_small(bench: Bench) -> Told:
    """So does code that adds a third of it."""
    return _disturbed(bench, "model.norm", 0.3)


def code_before_head(bench: Bench) -> Told:
    """Code between the final norm and the head fails."""
    return _disturbed(bench, "lm_head", 1.0)


def code_between_blocks(bench: Bench) -> Told:
    """Code between two blocks fails."""
    return _disturbed(bench, "model.layers.2", 0.5)


def code_between_blocks_small(bench: Bench) -> Told:
    """Also where it adds a tenth."""
    return _disturbed(bench, "model.layers.2", 0.1)


def before_final_norm(bench: Bench) -> Told:
    """Noise before the final norm fails `check`, anchored pass and all."""
    return _planted(bench, "model.norm:in=noise:1.0")


def before_final_norm_free(bench: Bench) -> Told:
    """And without an anchored pass."""
    return _planted(bench, "model.norm:in=noise:1.0", anchor=False)


def before_final_norm_small(bench: Bench) -> Told:
    """10% of noise there is far beyond rounding too."""
    return _planted(bench, "model.norm:in=noise:0.1")


def before_head(bench: Bench) -> Told:
    """Noise at what enters the head fails."""
    return _planted(bench, "lm_head:in=noise:1.0")


def head_output(bench: Bench) -> Told:
    """Logits that are scaled fail."""
    return _planted(bench, "lm_head:out=scale:1.3")


def head_bias_of_one_token(bench: Bench) -> Told:
    """One token's logit doubled at every position fails."""
    return _planted(bench, "lm_head:out=channel:77:3.0")


def bias_of_one_token(bench: Bench) -> Told:
    """One token's logit one larger at every position, of 2048: below two floors of the typical
    token, so it takes a truth and some tokens to see the column."""

    def biased(model: Any) -> None:
        one = torch.zeros(2048)
        one[33] = 1.0
        model.lm_head.register_forward_hook(lambda _, __, out: (out.float() + one).to(out.dtype))

    a = bench.reference(bench.model(size="demo", num_blocks=2), tokens=16)
    b = bench.capture(like=a, prepare=biased)
    return finds(compare(a, b, truth=bench.truth(a)), sides=("candidate", None))


def _scaled_before(bench: Bench, path: str, times: float, dtype: str) -> Told:
    def prepare(model: Any) -> None:
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, args: (args[0] * times, *args[1:])
        )

    a = bench.reference(bench.model(dtype=dtype), tokens=3)
    return checks(bench, a, bench.capture(like=a, prepare=prepare))


def scaled_before_head(bench: Bench) -> Told:
    """In float32, code that scales what enters the head by 5% fails."""
    return _scaled_before(bench, "lm_head", 1.05, "float32")


def scaled_before_first_block(bench: Bench) -> Told:
    """In bfloat16, code that scales what enters the first block by 10% fails."""
    return _scaled_before(bench, "model.layers.0", 1.1, "bfloat16")


def embedding(bench: Bench) -> Told:
    """Embeddings that are noisy fail."""
    return _planted(bench, "model.embed_tokens:out=noise:0.3")


def between_blocks(bench: Bench) -> Told:
    """Noise that a block's recorded input hides (between two blocks) fails."""
    return _planted(bench, "model.layers.2:in=noise:0.5")


def rotary_table(bench: Bench) -> Told:
    """A rotary table that is off at decode fails."""
    return _planted(bench, "model.rotary_emb:out=roll:1")


def one_step_of_head(bench: Bench) -> Told:
    """The head wrong in one decode step fails."""
    return _planted(bench, "model.norm:in=noise:1.0@step=2")


# ── another architecture ────────────────────────────────────────────────────────────────────────


def _edited(bench: Bench, source: Path, change: Any) -> Path:
    """A copy of the model folder whose config and weights ``change(config, weights)`` edits."""
    from safetensors.torch import load_file, save_file

    folder = bench.folder("model")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _doubled_last(config: dict, weights: dict) -> None:
    last = config["num_hidden_layers"] - 1
    for name in [n for n in weights if f"layers.{last}." in n]:
        weights[name.replace(f"layers.{last}.", f"layers.{last + 1}.")] = weights[name].clone()
    config["num_hidden_layers"] = last + 2


def _without_last(config: dict, weights: dict) -> None:
    last = config["num_hidden_layers"] - 1
    for name in [n for n in weights if f"layers.{last}." in n]:
        del weights[name]
    config["num_hidden_layers"] = last


def _other_model(bench: Bench, change: Any) -> Told:
    a = bench.reference(tokens=4)
    other = _edited(bench, bench.model(), change)
    return refuses(
        lambda: bench.capture(str(other), like=a),
        lambda b: checks(bench, a, b),
    )


def duplicated_layer(bench: Bench) -> Told:
    """A model with its last layer twice is another model."""
    return _other_model(bench, _doubled_last)


def missing_layer(bench: Bench) -> Told:
    """A model that lacks its last layer is another model."""
    return _other_model(bench, _without_last)


# ── integers, bools, nan and inf ────────────────────────────────────────────────────────────────


class _Mask(torch.nn.Module):
    """Gives out what ``make`` makes of the stream: a mask, or indices."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.make(hidden)


def _with_mask(make: Any) -> Any:
    def prepare(model: Any) -> None:
        model.model.add_module("masker", _Mask(make))
        model.model.layers[0].register_forward_pre_hook(
            lambda _, args: (model.model.masker(args[0]), None)[1]
        )

    return prepare


def _masks(bench: Bench, mine: Any, theirs: Any) -> Told:
    a = bench.capture(
        str(bench.model()),
        prompts=("A mask for each token.",),
        max_new_tokens=2,
        sites=("modules",),
        prepare=_with_mask(mine),
    )
    return checks(bench, a, bench.capture(like=a, prepare=_with_mask(theirs)))


def mask_of_bools(bench: Bench) -> Told:
    """A mask that is all true against one that is all false fails."""
    return _masks(bench, lambda x: x.abs() >= 0, lambda x: x.abs() < 0)


def indices(bench: Bench) -> Told:
    """Integers that are all one too large fail."""
    return _masks(
        bench,
        lambda x: torch.arange(x.shape[1])[None],
        lambda x: torch.arange(x.shape[1])[None] + 1,
    )


def _pair_of(bench: Bench, mine: Any, theirs: Any) -> tuple[Path, Path]:
    a = bench.capture(
        str(bench.model()), prompts=("Not a number.",), max_new_tokens=2, plants=[mine]
    )
    return a, bench.capture(like=a, plants=[theirs])


def nan_elsewhere(bench: Bench) -> Told:
    """A nan at another place fails."""
    return checks(bench, *_pair_of(bench, "lm_head:out=nan:3", "lm_head:out=nan:7"))


def inf_of_other_sign(bench: Bench) -> Told:
    """+inf against -inf fails."""

    def minus(tensor: torch.Tensor, _: int) -> torch.Tensor:
        out = tensor.clone()
        out.view(-1)[0] = -float("inf")
        return out

    other = Plant("lm_head:out", "lm_head", "out", "minus inf", minus)
    return checks(bench, *_pair_of(bench, "lm_head:out=inf:0", other))


def all_nan(bench: Bench) -> Told:
    """Two runs that are all nan are nonfinite on both sides, not identical."""
    a, b = _pair_of(bench, "model.layers.0:out=scale:nan", "model.layers.0:out=scale:nan")
    report = compare(a, b)
    if report.verdict.kind == "nonfinite" and report.verdict.side in ("both", None):
        return right(said(report))
    quiet = report.verdict.confidence == "high" or report.verdict.kind == "within_floor"
    return wrong(said(report)) if quiet else abstained(said(report))


def nan_in_both_and_fault(bench: Bench) -> Told:
    """A nan that both sides have does not hide a fault elsewhere."""
    nan = f"{BLOCK}:out=nan:3"
    a = bench.capture(
        str(bench.model()), prompts=("Not a number.",), max_new_tokens=2, plants=[nan]
    )
    b = bench.capture(like=a, plants=[nan, "model.layers.0:out=scale:1.2"])
    return checks(bench, a, b)


def golden_of_nan(bench: Bench) -> Told:
    """A golden that is all nan passes no check, not even against the same bits."""
    a, b = _pair_of(bench, "model.layers.0:out=scale:nan", "model.layers.0:out=scale:nan")
    return checks(bench, a, b)


CASES: tuple[Case, ...] = (
    Case("12", "code adds 10 × the stream before the norm", code_before_final_norm),
    Case("12", "0.3 × there", code_before_final_norm_small),
    Case("12", "1.0 × before the head", code_before_head),
    Case("12", "0.5 × before block 2", code_between_blocks),
    Case("12", "0.1 × there", code_between_blocks_small),
    Case("12", "noise 1.0 before the final norm", before_final_norm),
    Case("12", "the same, --no-anchor", before_final_norm_free),
    Case("12", "noise 0.1 before the final norm", before_final_norm_small),
    Case("12", "noise 1.0 before the head", before_head),
    Case("12", "logits × 1.3", head_output),
    Case("12", "one token's logit × 3", head_bias_of_one_token),
    Case("12", "one logit + 1 of 2048", bias_of_one_token),
    Case("12", "code scales before the head by 1.05, float32", scaled_before_head),
    Case("12", "code scales before block 0 by 1.1", scaled_before_first_block),
    Case("12", "noise 0.3 on the embeddings", embedding),
    Case("12", "noise 0.5 before block 2", between_blocks),
    Case("12", "rotary table one position off", rotary_table),
    Case("12", "noise 1.0 before the norm in step 2", one_step_of_head),
    Case("13", "last layer twice", duplicated_layer),
    Case("13", "last layer missing", missing_layer),
    Case("14", "mask true / false", mask_of_bools),
    Case("14", "indices + 1", indices),
    Case("15", "nan at another place", nan_elsewhere),
    Case("15", "+inf / -inf", inf_of_other_sign),
    Case("15", "all nan on both sides", all_nan),
    Case("15", "the same, check", golden_of_nan),
    Case("15", "nan in both, block 0 × 1.2", nan_in_both_and_fault),
)
