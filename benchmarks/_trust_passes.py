"""Cases of benchmarks/trust.py about silent passes: what `check` lets through with the shipped policy.

Faults outside the blocks, other architectures, integers, non-finite numbers, names with a slash,
goldens of which less was compared, and policies that are not what they seem."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

import divergence
from benchmarks._trust import Bench, Case, Told, abstained, fails, refuses, right, said, wrong
from divergence import compare
from divergence.capture.plant import Plant

__all__ = ["CASES"]

BLOCK = "model.layers.1"


def _checks(bench: Bench, a: Path, b: Path, *options: object) -> Told:
    """right: exit 1; abstained: refused with exit 2; wrong: a pass, or a fault of the tool."""
    return fails(bench.cli("check", a, b, *options))


def _planted(bench: Bench, fault: str, **values: Any) -> Told:
    a = bench.reference(tokens=4)
    return _checks(bench, a, bench.capture(like=a, plants=[fault], **values))


# ── outside the blocks ──────────────────────────────────────────────────────────────────────────


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


def embedding(bench: Bench) -> Told:
    """Embeddings that are noisy fail."""
    return _planted(bench, "model.embed_tokens:out=noise:0.3")


def between_blocks(bench: Bench) -> Told:
    """Noise that a block's recorded input hides (between two blocks) fails."""
    return _planted(bench, "model.layers.2:in=noise:0.5")


def rotary_table(bench: Bench) -> Told:
    """A rotary table that is off at decode fails."""
    return _planted(bench, "model.rotary_emb:out.0=roll:1")


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
        lambda b: _checks(bench, a, b),
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
    a = bench.capture(str(bench.model()), prompts=("A mask for each token.",), max_new_tokens=2,
                      sites=("modules",), prepare=_with_mask(mine))  # fmt: skip
    return _checks(bench, a, bench.capture(like=a, prepare=_with_mask(theirs)))


def mask_of_bools(bench: Bench) -> Told:
    """A mask that is all true against one that is all false fails."""
    return _masks(bench, lambda x: x.abs() >= 0, lambda x: x.abs() < 0)


def indices(bench: Bench) -> Told:
    """Integers that are all one too large fail."""
    return _masks(bench, lambda x: torch.arange(x.shape[1])[None],
                  lambda x: torch.arange(x.shape[1])[None] + 1)  # fmt: skip


def _pair_of(bench: Bench, mine: Any, theirs: Any) -> tuple[Path, Path]:
    a = bench.capture(str(bench.model()), prompts=("Not a number.",), max_new_tokens=2,
                      plants=[mine])  # fmt: skip
    return a, bench.capture(like=a, plants=[theirs])


def nan_elsewhere(bench: Bench) -> Told:
    """A nan at another place fails."""
    return _checks(bench, *_pair_of(bench, "lm_head:out=nan:3", "lm_head:out=nan:7"))


def inf_of_other_sign(bench: Bench) -> Told:
    """+inf against -inf fails."""

    def minus(tensor: torch.Tensor, _: int) -> torch.Tensor:
        out = tensor.clone()
        out.view(-1)[0] = -float("inf")
        return out

    other = Plant("lm_head:out", "lm_head", "out", "minus inf", minus)
    return _checks(bench, *_pair_of(bench, "lm_head:out=inf:0", other))


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
    a = bench.capture(str(bench.model()), prompts=("Not a number.",), max_new_tokens=2,
                      plants=[nan])  # fmt: skip
    b = bench.capture(like=a, plants=[nan, "model.layers.0:out=scale:1.2"])
    return _checks(bench, a, b)


# ── names and coverage ──────────────────────────────────────────────────────────────────────────


def slash_in_names(bench: Bench) -> Told:
    """Sites with a slash in their module's name are compared."""

    def renamed(model: Any) -> None:
        layers = model.model.layers
        del model.model._modules["layers"]
        model.model.__dict__["layers"] = layers
        model.model.add_module("part/layers", layers)

    def faulty(model: Any) -> None:
        renamed(model)
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, out: out * -3.7)

    a = bench.capture(str(bench.model()), prompts=("A slash.",), max_new_tokens=2, prepare=renamed)
    return _checks(bench, a, bench.capture(like=a, prepare=faulty))


def _lacking(bench: Bench, golden: dict[str, Any], new: dict[str, Any]) -> Told:
    a = bench.reference(prompts=1, tokens=4, **golden)
    b = bench.capture(like=a, **new)
    return _checks(bench, a, b)


def lacks_operators(bench: Bench) -> Told:
    """A new run without the golden's operators fails."""
    return _lacking(bench, {"sites": ("blocks", f"ops@{BLOCK}")}, {"sites": ("blocks",)})


def lacks_modules(bench: Bench) -> Told:
    """A new run without the golden's inner modules fails."""
    return _lacking(bench, {"sites": ("modules",)}, {"sites": ("blocks",)})


def lacks_steps(bench: Bench) -> Told:
    """A new run that recorded the prefill alone fails."""
    return _lacking(bench, {}, {"steps": "prefill"})


def truncated_generation(bench: Bench) -> Told:
    """A new run of two of the four tokens fails."""
    return _lacking(bench, {}, {"max_new_tokens": 2})


def lacks_anchored(bench: Bench) -> Told:
    """A golden with an anchored pass, a new run without one: fails."""
    first = bench.reference(prompts=1, tokens=4)
    golden = bench.capture(like=first)
    return _checks(bench, golden, bench.capture(like=first, anchor=False))


def lacks_escalated(bench: Bench) -> Told:
    """A golden with an escalated pass, a new run without one: fails."""
    first = bench.reference(prompts=1, tokens=4)
    golden = bench.capture(like=first, escalate=True)
    return _checks(bench, golden, bench.capture(like=first))


def lacks_a_prompt(bench: Bench) -> Told:
    """A new run of one of the golden's two prompts fails."""
    a = bench.reference(prompts=2, tokens=4)
    b = bench.reference(prompts=1, tokens=4)
    return _checks(bench, a, b)


def against_itself(bench: Bench) -> Told:
    """A run against itself proves nothing."""
    a = bench.reference(prompts=1, tokens=4)
    return _checks(bench, a, a)


def against_its_copy(bench: Bench) -> Told:
    """Nor does a run against a copy of its folder."""
    a = bench.reference(prompts=1, tokens=4)
    copy = bench.folder("copy")
    shutil.copytree(a, copy)
    return _checks(bench, a, copy)


def zero_tokens(bench: Bench) -> Told:
    """A golden in which no token was generated holds nothing to check them by."""
    a = bench.reference(prompts=1, tokens=0)
    return _checks(bench, a, bench.capture(like=a))


# ── policies ────────────────────────────────────────────────────────────────────────────────────

PERMISSIVE = (
    'verdicts = ["identical", "within_floor", "localized", "systematic", "drift"]\n'
    "min_coverage = 0.0\n"
)


def _faulty(bench: Bench) -> tuple[Path, Path]:
    a = bench.reference(prompts=1, tokens=4)
    return a, bench.capture(like=a, plants=[f"{BLOCK}:out=scale:1.5"])


def file_named_ci(bench: Bench) -> Told:
    """A file `ci` in the working directory is not the policy `ci`."""
    a, b = _faulty(bench)
    folder = bench.folder("work")
    folder.mkdir()
    (folder / "ci").write_text(PERMISSIVE)
    told = [fails(bench.cli("check", a, b, *more, cwd=folder)) for more in ((), ("--policy", "ci"))]
    return max(told, key=lambda one: ("right", "abstained", "wrong").index(one.outcome))


def _with_policy(bench: Bench, text: str) -> Told:
    """right: refused with 2 and the key's name, or failed with 1; wrong: a pass, or exit 3."""
    a, b = _faulty(bench)
    policy = bench.folder("policy").with_suffix(".toml")
    policy.write_text(text)
    told = fails(bench.cli("check", a, b, "--policy", policy))
    return right(told.said) if told.outcome == "abstained" else told


def threshold_of_zero(bench: Bench) -> Told:
    """A threshold of zero is an error in the policy."""
    return _with_policy(bench, "[thresholds]\ntypical = 0\n")


def threshold_of_nan(bench: Bench) -> Told:
    """So is one that is not a number."""
    return _with_policy(bench, "[thresholds]\ntypical = nan\n")


def threshold_without_bound(bench: Bench) -> Told:
    """So is one beyond any bound."""
    return _with_policy(bench, "[thresholds]\ntypical = 1e30\nworst = inf\n")


def tolerance_of_nan(bench: Bench) -> Told:
    """So is a tolerance that is not a number."""
    return _with_policy(bench, '[[tolerance]]\nsites = "*"\nrel_l2 = nan\n')


def known_difference(bench: Bench) -> Told:
    """A known difference with its reason and date lets that site pass, and is printed."""
    a, b = _faulty(bench)
    policy = bench.folder("policy").with_suffix(".toml")
    policy.write_text(f'[[known]]\nsites = "{BLOCK}:out"\nmax = 2.0\nreason = "bug 17"\n'
                      'until = "2099-01-01"\n')  # fmt: skip
    ran = bench.cli("check", a, b, "--policy", policy)
    if ran.code in (0, 1) and "bug 17" in ran.text:
        return right(f"exit {ran.code}, the reason is printed")
    return abstained(ran.err) if ran.code == 2 else wrong(f"exit {ran.code}: {ran.text[:100]}")


def known_difference_expired(bench: Bench) -> Told:
    """One whose date has passed excuses nothing."""
    a, b = _faulty(bench)
    policy = bench.folder("policy").with_suffix(".toml")
    policy.write_text('[[known]]\nsites = "*"\nmax = 2.0\nreason = "old"\nuntil = "2020-01-01"\n')
    return fails(bench.cli("check", a, b, "--policy", policy))


def healthy_passes(bench: Bench) -> Told:
    """A healthy pair under another kernel still passes."""
    a = bench.reference(tokens=4)
    ran = bench.cli("check", a, bench.capture(like=a, attn_implementation="sdpa"))
    text = f"exit {ran.code}: {' '.join((ran.out or ran.err).split())[:90]}"
    return right(text) if ran.code == 0 else wrong(text)


def healthy_passes_float16(bench: Bench) -> Told:
    """So does one in float16 of another architecture."""
    a = bench.reference(bench.model("gpt2", dtype="float16"), tokens=4)
    ran = bench.cli("check", a, bench.capture(like=a, attn_implementation="sdpa"))
    text = f"exit {ran.code}: {' '.join((ran.out or ran.err).split())[:90]}"
    return right(text) if ran.code == 0 else wrong(text)


def golden_of_nan(bench: Bench) -> Told:
    """A golden that is all nan passes no check, not even against the same bits."""
    a, b = _pair_of(bench, "model.layers.0:out=scale:nan", "model.layers.0:out=scale:nan")
    divergence.Run.open(a).close()
    return _checks(bench, a, b)


CASES: tuple[Case, ...] = (
    Case("12", "noise 1.0 before the final norm", before_final_norm),
    Case("12", "the same, --no-anchor", before_final_norm_free),
    Case("12", "noise 0.1 before the final norm", before_final_norm_small),
    Case("12", "noise 1.0 before the head", before_head),
    Case("12", "logits × 1.3", head_output),
    Case("12", "one token's logit × 3", head_bias_of_one_token),
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
    Case("16", "MLP × -3.7 under a name with a slash", slash_in_names),
    Case("17", "operators missing", lacks_operators),
    Case("17", "inner modules missing", lacks_modules),
    Case("17", "decode steps missing", lacks_steps),
    Case("17", "two of four tokens", truncated_generation),
    Case("17", "anchored pass missing", lacks_anchored),
    Case("17", "escalated pass missing", lacks_escalated),
    Case("17", "one prompt missing", lacks_a_prompt),
    Case("17", "a run against itself", against_itself),
    Case("17", "a run against its copy", against_its_copy),
    Case("17", "no token", zero_tokens),
    Case("18", "block × 1.5, a file named ci", file_named_ci),
    Case("18", "typical = 0", threshold_of_zero),
    Case("18", "typical = nan", threshold_of_nan),
    Case("18", "typical = 1e30", threshold_without_bound),
    Case("18", "rel_l2 = nan", tolerance_of_nan),
    Case("18", "[[known]]", known_difference),
    Case("18", "[[known]] out of date", known_difference_expired),
    Case("-", "nothing: sdpa, check", healthy_passes),
    Case("-", "nothing: sdpa, float16 gpt2, check", healthy_passes_float16),
)
