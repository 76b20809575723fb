"""The descent where the sides call an operator otherwise, or compute one thing by other ones."""

import json

import pytest

from divergence import capture, localize

BLOCK = "model.layers.1"


def another_scale(model):
    model.get_submodule(f"{BLOCK}.self_attn").scaling *= 1.05


def down_in_parts(model, num=8):
    """One matrix product as ``num`` partial ones, whose sums are kept in the model's dtype."""
    linear = model.get_submodule(f"{BLOCK}.mlp.down_proj")

    def forward(x):
        total = None
        for part, weight in zip(x.chunk(num, -1), linear.weight.chunk(num, -1), strict=True):
            product = part @ weight.T
            total = product if total is None else total + product
        return total

    linear.forward = forward


def wrong_part(model):
    """The same, and one of the parts is 5% off."""
    down_in_parts(model)
    linear = model.get_submodule(f"{BLOCK}.mlp.down_proj")
    healthy = linear.forward
    weight = linear.weight

    def forward(x):
        width = x.shape[-1] // 8
        return healthy(x) + 0.05 * (x[..., :width] @ weight[:, :width].T)

    linear.forward = forward


@pytest.fixture
def recorded(shared_run):
    def make(dtype):
        prompts = ["one two three four five six seven eight nine ten"]
        return shared_run(model={"dtype": dtype}, prompts=prompts, max_new_tokens=2)

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_scalar_is_named_with_both_values_and_two_reproducers(
    recorded, tmp_path, dtype, lines_of
):
    """The headline says which argument, the page that both sides are right by themselves."""
    a = recorded(dtype)
    b = capture(like=a, out=tmp_path / "b", prepare=another_scale)
    result = localize(a, b, out=tmp_path / "work", prepare_candidate=another_scale)
    text = "\n".join(lines_of(result, "-v"))
    first = text.splitlines()[0]
    assert first.startswith(f"LOCALIZED: {BLOCK}.self_attn/aten.mul")
    assert "is called with other=0.2625 (A 0.25)" in first
    assert "is correct on both sides" in " ".join(text.split())
    assert result.causal.holds
    for folder in (result.repro, result.repro_other):
        with open(f"{folder}/report.md", encoding="utf-8") as file:
            assert "`other` = `" in file.read()
    answer = json.loads(result.to_json())
    assert answer["operator"]["other_operands"][0]["argument"] == "other"


@pytest.mark.slow
def test_partial_products_are_not_paired_with_the_product(recorded, tmp_path):
    """Eight products and seven additions that are right: no operator is blamed."""
    a = recorded("float32")
    b = capture(like=a, out=tmp_path / "b", prepare=down_in_parts)
    result = localize(a, b, out=tmp_path / "work", prepare_candidate=down_in_parts, block=BLOCK)
    assert result.operator is None
    results = result.report.operators.results
    texts = {r.region.text for r in results if r.region is not None}
    assert texts == {"8 products and 7 additions in place of one product"}
    assert {r.operator for r in results if "down_proj" in r.site} == {"aten.mm.default"}


@pytest.mark.slow
def test_a_wrong_region_is_the_onset(recorded, tmp_path, lines_of):
    """It convicts like an operator, and is proven like one."""
    a = recorded("float32")
    b = capture(like=a, out=tmp_path / "b", prepare=wrong_part)
    result = localize(a, b, out=tmp_path / "work", prepare_candidate=wrong_part)
    assert result.operator.site == f"{BLOCK}.mlp.down_proj/aten.mm"
    assert result.side == "candidate"
    assert "in place of one product" in result.operator.region.text
    assert result.causal.holds
    assert (result.repro, result.alone[0].side) == (None, "reference")
    page = " ".join(lines_of(result, "-v"))
    assert "9 products, 8 additions and one multiplication in place of" in page


@pytest.mark.slow
def test_partial_sums_kept_in_bfloat16_are_seen_in_the_region(recorded, tmp_path, lines_of):
    """Within rounding for the block, several times an ideal product for the region."""
    a = recorded("bfloat16")
    b = capture(like=a, out=tmp_path / "b", prepare=down_in_parts)
    result = localize(a, b, out=tmp_path / "work", prepare_candidate=down_in_parts, block=BLOCK)
    assert result.operator.site == f"{BLOCK}.mlp.down_proj/aten.mm"
    assert (result.side, result.operator.why) == ("candidate", "roundings")
    assert 2 < result.operator.region.candidate_times < 4
    assert result.operator.region.reference_times < 1.2
    first = lines_of(result)[0]
    assert first.startswith(f"LOCALIZED: sums are rounded too often at {BLOCK}.mlp.down_proj")
    assert "× the error of an ideal product, by B" in first
