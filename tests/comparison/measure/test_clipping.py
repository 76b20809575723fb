"""Clipped gradients share the rounding of their norm."""

from types import SimpleNamespace

import pytest
import torch

import divergence
from divergence.comparison.measure.rating import SharedRounding
from divergence.numerics.floor import norm_floor
from divergence.numerics.formats import format_named


def run_of(norm):
    sites = {
        "embed#optimizer:in.weight": 10**7,
        "norm#optimizer:in.weight": 64,
        "norm#optimizer:out.weight": 64,
        ".#optimizer:in.grad_norm": 1,
    }
    summary = SimpleNamespace(rms=norm)
    training = SimpleNamespace(optimizer="sgd", learning_rate=0.5, clip_grad_norm=0.1)
    return SimpleNamespace(
        manifest=SimpleNamespace(training=training, model=SimpleNamespace(config={})),
        records=[
            SimpleNamespace(site=site, numel=numel, pass_="free", summary=summary, dtype="float32")
            for site, numel in sites.items()
        ],
    )


def test_what_is_clipped_has_the_error_of_the_norm():
    """What an optimizer gets and keeps shares the rounding of the norm; the gradients before it do
    not."""
    of = SharedRounding([run_of(2.0), run_of(2.0)], format_named("float32"))
    floor = norm_floor(10**7)
    assert of("norm#optimizer:in.weight") == of("norm#optimizer:out.weight.exp_avg") == floor
    assert of("norm#optimizer:out.weight.exp_avg_sq") == 2 * floor
    assert of("norm#optimizer:out.weight") == 0.5 * floor / 2  # the rate, over the weight
    assert of("norm#backward:out.weight") == 0


def test_norms_that_are_apart_are_off_themselves_and_excuse_what_follows():
    """Norms that differ are judged as such, and what is divided by them is allowed as much."""
    of = SharedRounding([run_of(2.0), run_of(2.02)], format_named("float32"))
    assert of(".#optimizer:in.grad_norm") == norm_floor(10**7)
    assert of("norm#optimizer:in.weight") == pytest.approx(0.01)


@pytest.fixture(scope="module")
def a(tiny_model, tmp_path_factory):
    model = str(tiny_model("llama", num_blocks=3))
    return divergence.capture(
        model,
        out=tmp_path_factory.mktemp("clip") / "a",
        training=divergence.TrainOptions(train=True, optimizer="adamw", clip_grad_norm=0.1),
        prompts=[[5, 9, 31, 7, 12, 40], [8, 3, 22, 9]],
        probe=False,
    )


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("judged", [True, False])
def test_a_norm_that_is_off_is_named_itself(judged, a, tmp_path, monkeypatch, answer):
    """As one that leaves out what another rank has: all that is clipped follows from it."""
    truth = divergence.truth(a, out=tmp_path / "truth") if judged else None
    real = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda *args: real(*args) * 0.97)
    verdict = answer(a, truth=truth).verdict
    assert verdict.onset.site == ".#optimizer:in.grad_norm", verdict.summary
    assert verdict.side == ("candidate" if judged else None)


@pytest.fixture(scope="module")
def half(a, tmp_path_factory):
    """The verdict on gradients that are clipped to half of the limit."""
    clip = torch.nn.utils.clip_grads_with_norm_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.utils,
            "clip_grads_with_norm_",
            lambda some, most, norm: clip(some, most / 2, norm),
        )
        b = divergence.capture(like=a, out=tmp_path_factory.mktemp("half") / "b", probe=False)
    return divergence.compare(a, b).verdict


@pytest.mark.whole
def test_a_clip_by_another_norm_is_the_optimizers(half):
    """The norm is right, and what is made of it is not: in all parameters alike."""
    assert half.kind == "systematic" and half.onset.phase == "optimizer"
    assert "the optimizer's step or its settings" in half.summary


@pytest.mark.whole
def test_a_clip_by_another_norm_is_named_with_its_factor(half):
    """Training's domain counts the gradients."""
    told = " ".join(one.text for one in half.evidence)
    assert "gradients that the optimizer gets are off" in told
    assert "all of them are 0.5 × A's in B: another limit, norm or loss scale" in told


@pytest.mark.slow
@pytest.mark.whole
def test_one_parameter_that_is_not_clipped_is_named(a, monkeypatch, answer):
    """Also outside blocks."""
    clip = torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grads_with_norm_", lambda some, *how: clip(list(some)[1:], *how)
    )
    verdict = answer(a).verdict
    assert verdict.onset.site == "model.embed_tokens#optimizer:in.weight", verdict.summary
