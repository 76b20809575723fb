"""Another architecture is another experiment, whatever values its parameters share."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from divergence import capture, check, compare
from divergence.comparison.preflight import match_parameters
from divergence.errors import IncomparableError
from tests import by_hand

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact."]


@pytest.fixture(scope="module")
def variant(tmp_path_factory, tiny_model):
    """``variant([0, 1, 1])`` → a model with these blocks of the tiny one, in this order."""

    def make(order, edit=lambda weights: None):
        folder = tmp_path_factory.mktemp("model") / "model"
        shutil.copytree(tiny_model("llama", dtype="bfloat16"), folder)
        weights = load_file(folder / "model.safetensors")
        new = {name: value for name, value in weights.items() if ".layers." not in name}
        for place, block in enumerate(order):
            for name, value in weights.items():
                if f".layers.{block}." in name:
                    new[name.replace(f".layers.{block}.", f".layers.{place}.")] = value.clone()
        edit(new)
        save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = len(order)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture(scope="module")
def golden(tmp_path_factory, variant):
    out = tmp_path_factory.mktemp("golden") / "run"
    return capture(variant([0, 1, 2]), out=out, prompts=PROMPTS, max_new_tokens=2)


def line(report, check):
    return next((item for item in report.preflight if item.check == check), None)


def copied(weights):
    name = "model.layers.2.mlp.{}.weight"
    weights[name.format("up_proj")] = weights[name.format("gate_proj")].clone()


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(
    ("order", "edit", "told"),
    [
        ([0, 1, 2, 2], None, "9 only in B: model.layers.3."),
        ([0, 1], None, "9 only in A: model.layers.2."),
        ([0, 2, 1], None, None),
        ([0, 1, 1], None, None),
        ([0, 1, 2], copied, None),
    ],
)
def test_other_blocks_are_blocking(golden, variant, tmp_path, order, edit, told, dtype):
    """An extra, a missing, a moved and a duplicated layer, and a tensor in another's place: every
    value of one side is on the other too, and it is another model."""
    model = variant(order, edit) if edit else variant(order)
    options = {} if dtype is None else {"dtype": dtype}
    new = capture(model, like=golden, out=tmp_path / "new", **options)
    for one, two in ((golden, new), (new, golden)):
        with pytest.raises(IncomparableError, match="other weights") as caught:
            check(one, two)
        assert caught.value.exit_code == 2
    report = compare(golden, new)
    weights = line(report, "weights")
    assert weights.status == "blocking"
    if told is not None:
        assert told in weights.detail
        assert line(report, "blocks").status == "blocking"
        assert "blocks" in report.verdict.summary
    elif dtype is None:
        assert "parameters differ: model.layers." in weights.detail
    assert (line(report, "blocks") is None) == (told is None)


def test_a_forced_comparison_counts_the_extra_block(golden, variant, tmp_path):
    """What only the candidate has, though the golden was asked for all blocks, lowers coverage."""
    new = capture(variant([0, 1, 2, 2]), like=golden, out=tmp_path / "new")
    report = compare(golden, new, force=True)
    (row,) = (r for r in report.coverage.passes if (r.pass_, r.what) == ("free", "tensors"))
    assert row.num_extra > 0 and row.share < 1
    assert row.reason == "A has no module model.layers.3"
    assert report.verdict.confidence == "low"


def moved(parent, old, new):
    """Gives a child module another name, in the model and in its parent's forward."""
    parent.add_module(new, parent._modules.pop(old))
    kind = type(parent)
    child_of = property(lambda self: self._modules[new])
    parent.__class__ = type(kind.__name__, (kind,), {old: child_of})


ANY_CODE = by_hand.policy(preflight={"allow": ["*"], "code": "allow"})
"""A module under another name has other code around it."""


def test_other_names_need_a_map_or_a_prefix(golden, tmp_path):
    """A prefix is found; what no prefix reads blocks, until a name map says what it is."""
    folder = golden.manifest.model.source

    def other_prefix(model):
        moved(model.model, "layers", "blocks")

    def other_part(model):
        for block in model.model.layers:
            moved(block, "mlp", "ffn")

    options = {"prompts": PROMPTS, "max_new_tokens": 2}
    new = capture(folder, out=tmp_path / "prefix", prepare=other_prefix, **options)
    result = check(golden, new, policy=ANY_CODE)
    assert result.passed
    detail = line(result.report, "weights").detail
    assert detail == ("the same values under other names: model.layers. read as model.blocks.")
    new = capture(folder, out=tmp_path / "part", prepare=other_part, **options)
    with pytest.raises(IncomparableError, match="other weights"):
        check(golden, new)
    names = tmp_path / "names.toml"
    names.write_text('[map]\n"model.layers.{n}.mlp" = "model.layers.{n}.ffn"\n')
    result = check(golden, new, name_map=names, policy=ANY_CODE)
    assert result.passed
    assert "by the name map" in line(result.report, "weights").detail


# --- names alone -------------------------------------------------------------------------------


BODY = {"embed.weight": "e", "layers.0.w": "0", "layers.1.w": "1", "norm.weight": "n"}


def under(prefix, body=BODY):
    return {prefix + name: value for name, value in body.items()}


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        (BODY, BODY, True),
        (under("model."), BODY, True),
        (BODY, under("model.") | {"lm_head.weight": "h"}, True),
        (BODY, under("model.") | {"lm_head.weight": "e"}, True),  # tied, written out
        (BODY, BODY | {"lm_head.weight": "e"}, True),
        (BODY, BODY | {"lm_head.weight": "h"}, False),  # an own head where there was none
        (BODY, under("model.") | {"model.norm2.weight": "x"}, False),
        (BODY, under("model.") | {"model.layers.2.w": "1"}, False),
        (BODY, under("model.") | {"tower.layers.0.w": "0"}, False),
        (BODY, BODY | {"layers.2.w": "1"}, False),
        (BODY, {name: BODY[name] for name in list(BODY)[:2]}, False),
        (under("text.") | under("image."), under("model.text.") | under("model.image."), True),
        (under("text.") | under("image."), under("a.text.") | under("b.image."), True),
        (BODY, {"x.y": "e"}, False),
        (BODY, {}, False),
    ],
)
def test_parameters_are_matched_one_to_one(a, b, fits):
    """As they stand, by prefixes, with a head or a tie besides; everything else does not fit."""
    for one, two in ((a, b), (b, a)):
        found = match_parameters(one, two)
        assert len(set(found.pairs.values())) == len(found.pairs)
        assert found.is_one_to_one is fits, found


def test_a_map_comes_before_prefixes():
    """What it names is matched by it, the rest as without it."""

    def names(site):
        return site.replace("layers.", "h.")

    theirs = {name.replace("layers.", "h."): value for name, value in BODY.items()}
    found = match_parameters(BODY, theirs, names)
    assert found.is_one_to_one and found.mapped
    assert found.pairs["layers.1.w"] == "h.1.w"
    assert found.pairs["norm.weight"] == "norm.weight"


def test_every_module_has_a_weight_and_no_prefix_ends_behind_one():
    """Of two architectures nothing but the head has a like name: no embedding is read as a norm."""
    llama = ["model.embed_tokens", "model.layers.0.mlp.up_proj", "model.norm", "lm_head"]
    gpt2 = ["transformer.wte", "transformer.h.0.mlp.c_fc", "transformer.ln_f", "lm_head"]
    a, b = ({f"{path}.weight": path for path in paths} for paths in (llama, gpt2))
    matching = match_parameters(a, b)
    assert (matching.pairs, matching.prefixes) == ({"lm_head.weight": "lm_head.weight"}, [])
    inner = {name.removeprefix("model."): digest for name, digest in a.items()}
    assert match_parameters(a, inner).prefixes == [("model.", "")]
