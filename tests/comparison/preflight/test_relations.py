"""Weights that are not equal: the relation that was found is said, and values that differ in their
dtype alone are the same weights."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from divergence import capture, compare

UP = "mlp.up_proj"
EVERYWHERE = f"model.layers.*.{UP}.weight: "
PROMPTS = [[5, 9, 17, 101, 23, 44, 61, 8]]


@pytest.fixture
def recorded(shared_run):
    """``recorded("bfloat16")`` → a run of the tiny Llama in this dtype."""

    def make(dtype):
        options = {"prompts": PROMPTS, "max_new_tokens": 2, "probe": False}
        return shared_run(dtype=dtype, prepare=filled, **options)

    return make


def filled(model):
    """The checkpoint is in bfloat16: in float32 its numbers get the bits that it lacks."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.data *= 1 + 1e-3 * torch.rand(parameter.shape, generator=generator)


def weights_line(report):
    return next(line for line in report.preflight if line.check == "weights")


def cast(dtype, module, args):
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)


def cast_back(dtype, module, args, out):
    return out.to(dtype)


def changed(run, out, change, name=UP):
    """The run once more, with ``change(weight)`` in the place of each weight of this name."""

    def prepare(model):
        filled(model)
        for path, module in model.named_modules():
            if path.endswith(name):
                dtype, module.weight.data = module.weight.dtype, change(module.weight.data)
                if module.weight.dtype != dtype:  # what is around it stays in the model's
                    module.register_forward_pre_hook(partial(cast, module.weight.dtype))
                    module.register_forward_hook(partial(cast_back, dtype))

    return capture(like=run, out=out, prepare=prepare, force=True, probe=False)


def requantized(weight):
    step = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / step).round() * step


def trained(weight):
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return weight + 0.03 * weight.std() * noise


@pytest.mark.parametrize("name", [UP, "input_layernorm", "embed_tokens"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equal_values_in_another_dtype_are_the_same_weights(name, dtype, recorded, tmp_path):
    """Parameters of one class that are kept wider, as frameworks keep norms and routers: the runs
    are comparable, and both dtypes are said."""
    a = recorded(dtype)
    b = changed(a, tmp_path / "b", torch.Tensor.float, name)
    report = compare(a, b)
    line = weights_line(report)
    assert line.status == "differs"
    assert f"{dtype} / float32, equal values" in line.detail
    assert report.verdict.kind != "incomparable"
    assert any(line.detail in fact.text for fact in report.verdict.evidence)


def test_a_class_that_is_rounded_to_its_own_dtype_is_the_same_weights(recorded, tmp_path):
    """One class of parameters in bfloat16, of a model in float32: other numbers, by their dtype."""
    a = recorded("float32")
    line = weights_line(compare(a, changed(a, tmp_path / "b", torch.Tensor.bfloat16, "lm_head")))
    assert line.status == "differs"
    assert "B = A rounded to bfloat16" in line.detail


@pytest.mark.parametrize(("share", "status"), [(0.0, "differs"), (0.01, "blocking")])
def test_two_roundings_of_one_checkpoint_are_the_same_weights(share, status, recorded, tmp_path):
    """bfloat16 and float16 of one float32 checkpoint: neither holds the other's values, but they
    are as far apart as their rounding. What was changed by 1% is other weights."""

    def prepare(model):
        for parameter in model.parameters():
            parameter.data *= 1 + share

    b = capture(like=recorded("bfloat16"), out=tmp_path / "b", dtype="float16", prepare=prepare)
    line = weights_line(compare(recorded("bfloat16"), b))
    assert line.status == status
    assert ("bfloat16 / float16, as far apart as their rounding" in line.detail) == (not share)


@pytest.mark.parametrize(
    ("change", "relation"),
    [
        (lambda weight: weight.bfloat16().float(), "B = A rounded to bfloat16"),
        (lambda weight: weight.half().float(), "B = A rounded to float16"),
        (lambda weight: weight.roll(3, 0), "the same rows in another order"),
        (lambda weight: weight.flip(1), "the same columns in another order"),
        (lambda weight: weight * 1.5, "B = 1.5 x A"),
        (lambda weight: -weight, "B = -1 x A"),
        (torch.zeros_like, "all zeros on B"),
        (lambda weight: weight + 0.5, "B = A + 0.5"),
        (lambda weight: weight.clone().index_fill_(0, torch.tensor(3), math.nan), "not finite"),
        (requantized, "as after quantising (B's numbers are multiples of one step)"),
        (trained, "% apart, as after training further"),
        (  # one last bit
            lambda weight: torch.nextafter(weight, torch.full_like(weight, math.inf)),
            "apart, nearer than sums of them tell: merged or rounded in another order, or trained",
        ),
    ],
)
def test_other_weights_are_told_by_what_was_done_to_them(change, relation, recorded, tmp_path):
    """Values in one dtype that are not equal stop a comparison, and what relates them is said."""
    a = recorded("float32")
    report = compare(a, changed(a, tmp_path / "b", change))
    line = weights_line(report)
    assert (report.verdict.kind, line.status) == ("incomparable", "blocking")
    assert EVERYWHERE in line.detail
    assert relation in line.detail


def _merged(weight, size):
    """W + BA, rounded, less BA, rounded: another order of roundings."""
    generator = torch.Generator().manual_seed(2)
    update = torch.randn(weight.shape, generator=generator) * size * weight.float().std()
    return ((weight.float() + update).bfloat16() - update.bfloat16()).to(weight.dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: _merged(weight, 0.01),
        lambda weight: _merged(weight, 0.1),
        lambda weight: (weight.float() * (1 + 2.5e-3)).to(weight.dtype),
    ],
)
def test_weights_as_far_apart_as_their_dtypes_rounding_are_told_so(change, recorded, tmp_path):
    """Some last bits of bfloat16 weights differ: no order of rows, no factor of 1, and one text of
    all blocks' parameters with the least and the largest distance."""
    detail = weights_line(
        compare(recorded("bfloat16"), changed(recorded("bfloat16"), tmp_path / "b", change))
    ).detail
    assert "apart, no more than rounding to bfloat16 makes" in detail
    assert detail.count(EVERYWHERE) == 1
    assert "in another order" not in detail.replace("rounded in another order", "")
    assert " x A" not in detail


def test_weights_that_have_nothing_to_do_with_each_other_have_no_relation(recorded, tmp_path):
    """Other random numbers of the same size: only how many parameters differ is said."""
    a = recorded("float32")
    other = changed(a, tmp_path / "b", lambda weight: torch.randn(weight.shape) * weight.std())
    detail = weights_line(compare(a, other)).detail
    assert f"{UP}.weight" in detail
    assert EVERYWHERE not in detail
    assert "apart" not in detail and "as after" not in detail


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_model):
    """``checkpoint(edit)`` → the tiny Llama, its stored weights edited."""

    def make(edit):
        folder = tmp_path_factory.mktemp("model") / "model"
        shutil.copytree(tiny_model("llama"), folder)
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("edit", "relation"),
    [
        (
            lambda weights: weights.pop(f"model.layers.1.{UP}.weight"),
            "freshly initialised on B, whose checkpoint lacks it",
        ),
        (
            lambda weights: weights.update(
                {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
            ),
            "lm_head.weight: the same values as model.embed_tokens.weight on B alone",
        ),
        (
            lambda weights: weights.update(
                {f"model.layers.1.{UP}.weight": weights[f"model.layers.0.{UP}.weight"].clone()}
            ),
            f"the same values as model.layers.0.{UP}.weight on B alone, as of tied weights",
        ),
    ],
)
def test_what_a_checkpoint_lacks_or_has_twice_is_said(edit, relation, checkpoint, tmp_path):
    """A parameter that no checkpoint held is random, and one with another's values is tied to it:
    neither is a model that was trained further."""

    def untied(weights):
        generator = torch.Generator().manual_seed(2)
        size = weights["model.embed_tokens.weight"].shape
        weights["lm_head.weight"] = torch.randn(size, generator=generator) * 0.02

    def edited(weights):
        untied(weights)
        edit(weights)

    runs = [
        capture(
            checkpoint(change), out=tmp_path / name, prompts=PROMPTS, max_new_tokens=1, probe=False
        )
        for name, change in (("a", untied), ("b", edited))
    ]
    line = weights_line(compare(*runs))
    assert line.status == "blocking"
    assert relation in line.detail


@pytest.mark.whole
def test_checkpoints_that_are_at_hand_are_offered_to_be_compared(tiny_model, tmp_path):
    """What relates them stands first, and the next command compares the files."""
    model = str(tiny_model("llama"))
    shutil.copytree(model, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.1.{UP}.weight"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    how = {"prompts": PROMPTS, "max_new_tokens": 2, "probe": False}
    a = capture(model, out=tmp_path / "a", **how)
    b = capture(str(tmp_path / "other"), out=tmp_path / "b", **how)
    verdict = compare(a, b).verdict
    assert verdict.evidence[0].text.startswith(f"weights: model.layers.1.{UP}.weight: B = 2 × A")
    assert verdict.next[0] == f"divergence weights {model} {tmp_path / 'other'}"
