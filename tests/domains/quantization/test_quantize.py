"""quantize(): costs, matrices alone, and policies that were run."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from divergence import Run, capture, quantize
from divergence.domains.quantization.quantize import cost_of, forms
from divergence.domains.quantization.scheme import scheme_named
from divergence.errors import UsageError
from divergence.numerics.logits import row_costs

PROMPTS = ["one two three four five six seven", "eight nine ten eleven twelve", "the cat sat"]


@pytest.fixture(scope="module")
def plain(shared_run):
    model = {"num_blocks": 3, "hidden": 64, "dtype": "float32"}
    return shared_run(model=model, prompts=PROMPTS, max_new_tokens=2, probe=False)


@pytest.fixture(scope="module")
def each(plain):
    return quantize(plain, scheme="w4a16-g32", each=True)


def test_the_numbers_of_a_pair_of_rows():
    """KL, Δp and ln PPL by their definitions, worked out in float64."""
    made = torch.Generator().manual_seed(0)
    a = torch.randn(6, 11, generator=made, dtype=torch.float64)
    b = a + 0.1 * torch.randn(6, 11, generator=made, dtype=torch.float64)
    following = [3, 1, 4, 1, 5, -1]
    cost = cost_of([row_costs(a, b, following)])
    p, q = a.log_softmax(-1).numpy(), b.log_softmax(-1).numpy()
    kl = (np.exp(p) * (p - q)).sum(1)
    rows, ids = np.arange(5), np.array(following[:5])
    mine, other = p[rows, ids], q[rows, ids]
    assert math.isclose(cost.kl_mean, kl.mean(), rel_tol=1e-9)
    assert math.isclose(cost.kl_error, kl.std(ddof=1) / math.sqrt(6), rel_tol=1e-9)
    assert math.isclose(cost.kl_max, kl.max(), rel_tol=1e-9)
    assert cost.same_top == (p.argmax(1) == q.argmax(1)).mean()
    delta = np.exp(other) - np.exp(mine)
    assert math.isclose(cost.delta_p_mean, delta.mean(), rel_tol=1e-9)
    assert math.isclose(cost.delta_p_rms, math.sqrt((delta**2).mean()), rel_tol=1e-9)
    assert math.isclose(cost.perplexity, math.exp(-other.mean()), rel_tol=1e-9)
    assert math.isclose(cost.ln_ratio, (mine - other).mean(), rel_tol=1e-9)
    assert math.isclose(cost.ln_correlation, np.corrcoef(mine, other)[0, 1], rel_tol=1e-9)
    assert (cost.num_tokens, cost.num_following) == (6, 5)


def test_a_row_that_is_not_finite_costs_without_end():
    """One nan makes the cost infinite, not unknown."""
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 0] = math.nan
    assert cost_of([row_costs(a, b, [0, -1])]).kl_mean == math.inf


def test_more_bits_cost_less(plain):
    """Costs of three schemes are in the order of their bits."""
    costs = [quantize(plain, scheme=name).cost.kl_mean for name in ("w8a16", "w8a8", "w4a16-g32")]
    assert 0 < costs[0] < costs[1] < costs[2]


def test_every_matrix_is_measured_alone(each):
    """Each has a cost, an error and a floor; the prediction adds up those that are quantised."""
    kinds = {one.part for one in each.matrices}
    assert kinds == {"linear", "head", "embedding", "norm"}
    quantised = [one for one in each.matrices if one.by_default]
    assert len(quantised) == each.num_quantized == 3 * 7
    assert all(one.cost.kl_mean > 0 and one.block_error > 0 for one in quantised)
    assert all(one.floor < 1e-5 and one.times_floor > 100 for one in quantised)
    assert all(one.outliers.max > 0 and one.outliers.quantile_score > 0 for one in quantised)
    assert math.isclose(each.predicted, sum(one.cost.kl_mean for one in quantised))
    assert each.worst()[0].cost.kl_mean == max(one.cost.kl_mean for one in each.matrices)


def test_a_matrix_alone_is_what_the_whole_forward_says(plain, each):
    """Skipping the blocks before it changes nothing."""
    name = "model.layers.2.mlp.down_proj"
    alone = next(one for one in each.matrices if one.name == name)
    others = [one.name for one in each.matrices if one.by_default and one.name != name]
    whole = quantize(plain, scheme="w4a16-g32", keep=others)
    assert whole.num_quantized == 1
    assert whole.cost == alone.cost


@pytest.mark.slow
def test_a_policy_holds_when_it_is_run(plain, each, tmp_path, invoke):
    """What is written is the model that was measured; with fewer kept the target is missed."""
    target = each.cost.kl_mean / 3
    asked = ("--scheme", "w4a16-g32", "--target", target, "-o", tmp_path / "q")
    text = invoke("quantize", plain.path, *asked)[1]
    found = quantize(plain, scheme="w4a16-g32", target=target, out=tmp_path / "q", force=True)
    policy = found.policy
    assert 0 < len(policy.keep) < each.num_quantized
    assert policy.measured <= target < policy.one_fewer
    assert quantize(plain, scheme="w4a16-g32", keep=policy.keep).cost == policy.cost
    run = Run.open(found.out)
    assert run.manifest.engine.options["keep"] == ",".join(policy.keep)
    fused = [name for name in policy.keep if name.endswith("q_proj")]
    assert all(name.replace("q_proj", "k_proj") in policy.keep for name in fused)
    assert policy.keep[0] in text
    # the KL above is that of the whole scheme
    assert f"{each.num_quantized} matrices ({found.num_quantized} with the policy below)" in text
    groups = {
        name.replace("q_proj", "qkv")
        .replace("k_proj", "qkv")
        .replace("v_proj", "qkv")
        .replace("gate_proj", "gate_up")
        .replace("up_proj", "gate_up")
        for name in policy.keep
    }
    assert policy.num_groups == len(groups) < len(policy.keep)
    assert f"with any one of their {len(groups)} group" in text


@pytest.mark.slow
def test_a_target_that_holds_anyway_keeps_nothing(plain, invoke, tmp_path):
    """And the headline says so, and what was written the last line."""
    lists = tmp_path / "lists"
    asked = ("--scheme", "w8a16", "--target", 10.0, "--policy", lists)
    text = invoke("quantize", plain.path, *asked)[1]
    assert "nothing kept" in text and "to keep" not in text
    names = [file.name for file in sorted(lists.iterdir())]
    assert text.endswith(f"wrote       {lists}: {', '.join(names)}\n") and len(names) == 3


def test_static_scales_say_how_few_tokens_made_them(plain, invoke):
    """With how many are usual, and what smoothing changed."""
    text = invoke("quantize", plain.path, "--scheme", "w8a8-static", "--smooth", 0.5)[1]
    for part in ("512 and more are usual", "6 norms", "alpha 0.5"):
        assert part in " ".join(text.split())


def test_lists_that_quantisers_read():
    """The kept names are written as each of three tools reads them."""
    names = ["lm_head", "model.layers.0.mlp.down_proj"]
    written = forms(names, scheme_named("w8a8"))
    assert json.loads(written["compressed-tensors.json"]) == {"ignore": names}
    slim = yaml.safe_load(written["msmodelslim.yaml"])["spec"]["process"][0]
    assert slim["exclude"] == names
    assert slim["qconfig"]["act"] == {
        "scope": "per_token",
        "dtype": "int8",
        "symmetric": True,
        "method": "minmax",
    }
    assert "ext" not in slim["qconfig"]["weight"]
    off = yaml.safe_load(written["modelopt.yaml"])["quant_cfg"]
    assert [one["enable"] for one in off] == [False, False]


@pytest.mark.parametrize(("scheme", "size"), [("w4a16", 128), ("w4a16-g32", 32), ("w4a8", 128)])
def test_a_group_has_its_size(scheme, size):
    """Without it msmodelslim groups otherwise than what was measured."""
    slim = yaml.safe_load(forms(["lm_head"], scheme_named(scheme))["msmodelslim.yaml"])
    weight = slim["spec"]["process"][0]["qconfig"]["weight"]
    assert (weight["scope"], weight["ext"]) == ("per_group", {"group_size": size})


@pytest.mark.slow
def test_a_model_is_captured_first(plain, tmp_path):
    """A model in place of a run is recorded, then quantised."""
    found = quantize(
        plain.manifest.model.source, prompts=["one two three"], out=tmp_path / "q", scheme="w8a8"
    )
    assert Run.open(tmp_path / "q").manifest.like == Run.open(tmp_path / "q-base").manifest.id
    assert found.num_prompts == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": -1.0}, "above 0"),
        ({"target": 0.1, "measure": "ppl"}, "one of kl, logprob"),
        ({"scheme": "kv8", "target": 0.1}, "no matrix"),
        ({"scheme": "w8a88"}, "did you mean w8a8"),
        ({"prompts": ["x"]}, "leave out --prompt"),
    ],
)
def test_what_cannot_be_is_refused(plain, options, words):
    """Each wrong combination of options says what is wrong."""
    with pytest.raises(UsageError) as caught:
        quantize(plain, **options)
    assert words in f"{caught.value} {caught.value.hint}"


@pytest.mark.slow
def test_a_quantised_run_is_not_quantised_again(plain, tmp_path):
    """It is no base to measure against."""
    quantize(plain, scheme="w8a8", out=tmp_path / "q")
    with pytest.raises(UsageError, match="quantised run itself"):
        quantize(tmp_path / "q", scheme="w4a16-g32")


def test_an_encoder_is_quantised_but_has_no_next_token(tiny_model, tmp_path):
    """Its error is measured, its cost is not."""
    run = capture(
        tiny_model("bert", num_blocks=2), out=tmp_path / "a", prompts=["one two"], probe=False
    )
    found = quantize(run, scheme="w8a8", out=tmp_path / "q")
    assert found.cost is None
    assert Run.open(tmp_path / "q").manifest.engine.options["scheme"] == "w8a8"
    with pytest.raises(UsageError, match="no causal language model"):
        quantize(run, scheme="w8a8", each=True)
