"""LoRA adapters as PEFT writes them: by the products that they add, and merged into their base."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from divergence import capture, compare, compare_weights
from divergence.errors import ModelError, UsageError

MODULES = [f"model.layers.{n}.self_attn.{name}_proj" for n in range(2) for name in "qv"]
RANK, ALPHA = 4, 8


def draw(*shape, seed, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FACTORS = {
    module: (draw(RANK, 48, seed=n, size=0.1), draw(64, RANK, seed=50 + n, size=0.1))
    for n, module in enumerate(MODULES)
}
BASE = {f"{module}.weight": draw(64, 48, seed=90).bfloat16() for module in MODULES}
BASE["model.norm.weight"] = torch.ones(48).bfloat16()


def added(times=1.0):
    """The base with the adapter, as PEFT merges it."""
    merged = {
        f"{module}.weight": (BASE[f"{module}.weight"] + times * ALPHA / RANK * b @ a).bfloat16()
        for module, (a, b) in FACTORS.items()
    }
    return {**BASE, **merged}


@pytest.fixture
def stored(tmp_path):
    """``stored(name, tensors)`` → a directory; with ``config`` an adapter of the base."""

    def make(name, tensors, **config):
        (tmp_path / name).mkdir(exist_ok=True)
        if config:
            tensors = {
                f"base_model.model.{module}.lora_{letter}.weight": tensor.contiguous()
                for module, pair in tensors.items()
                for letter, tensor in zip("AB", pair, strict=True)
            }
            whole = {
                "peft_type": "LORA",
                "base_model_name_or_path": str(tmp_path / "base"),
                "r": RANK,
                "lora_alpha": ALPHA,
            }
            (tmp_path / name / "adapter_config.json").write_text(json.dumps(whole | config))
        file = "adapter_model.safetensors" if config else "model.safetensors"
        save_file(tensors, tmp_path / name / file)
        return tmp_path / name

    make("base", BASE)
    return make


CASES = {
    "merged": (added, "IDENTICAL"),
    "not merged": (lambda: BASE, "the adapter's base, to which nothing was added"),
    "twice": (lambda: added(2.0), "the adapter is merged 2 times over"),
    "taken away": (lambda: added(-1.0), "the adapter is merged -1 times over"),
    "other weights": (
        lambda: {**added(), MODULES[0] + ".weight": draw(64, 48, seed=7)},
        "unrelated",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_against_a_checkpoint(stored, invoke, case):
    """An adapter is merged and compared with weights in either order."""
    tensors, words = CASES[case]
    adapter, other = stored("lora", FACTORS, r=RANK), stored("other", tensors())
    code, out, _ = invoke("weights", adapter, other)
    out = " ".join(out.split())
    assert code == 0 and words in out
    assert "A is a LoRA adapter of" in out and "(rank 4, alpha 8, 4 matrices), merged here" in out
    assert ("SAME WEIGHTS" in out or "IDENTICAL" in out) == (case == "merged")
    report = compare_weights(other, adapter)
    assert report.equal == (case == "merged")


def test_a_merge_in_float32_is_told_up_to_its_rounding(stored):
    """In the order in which PEFT multiplies it is equal; in another one what is added is larger
    than the base, and rounds as the sum does."""
    stored("base", {name: tensor.float() for name, tensor in BASE.items()})
    large = {module: (a, 100 * b) for module, (a, b) in FACTORS.items()}
    lora = stored("lora", large, r=RANK)
    sums = ({}, {})
    for module, (a, b) in large.items():
        weight = BASE[f"{module}.weight"].float()
        sums[0][f"{module}.weight"] = weight + b @ a * (ALPHA / RANK)
        sums[1][f"{module}.weight"] = (weight + ALPHA / RANK * b.double() @ a.double()).float()
    assert compare_weights(lora, stored("peft", {**BASE, **sums[0]})).same
    report = compare_weights(lora, stored("other", {**BASE, **sums[1]}))
    assert report.same and "merged" in [relation.name for relation in report.relations]


def test_two_adapters_by_their_products(stored):
    """Other factors of one product are the same adapter; another alpha is a multiple of it."""
    turn = torch.linalg.qr(draw(RANK, RANK, seed=3))[0]
    turned = {module: (turn @ a, b @ turn.T) for module, (a, b) in FACTORS.items()}
    lora = stored("lora", FACTORS, r=RANK)
    same = compare_weights(lora, stored("turned", turned, r=RANK))
    assert same.same and same.relations[0].name == "product"
    twice = compare_weights(lora, stored("twice", turned, lora_alpha=2 * ALPHA))
    assert not twice.same and twice.relations[0].num_parameters == len(MODULES)
    assert twice.relations[0].text == "2 times A's product, as of another alpha"
    root = stored("root", FACTORS, use_rslora=True)
    assert compare_weights(lora, root).relations[0].text.startswith("2 times A's product")
    other = {**FACTORS, MODULES[1]: (draw(RANK, 48, seed=11), FACTORS[MODULES[1]][1])}
    report = compare_weights(lora, stored("other", other, r=RANK))
    assert [row.names for row in report.others] == [[f"{MODULES[1]}.weight"]]
    assert report.num_equal == len(MODULES) - 1


def test_what_cannot_be_read_is_told(stored, invoke, tmp_path):
    """Another kind of adapter, a base that is not here, and an adapter in the place of a model."""
    base = stored("base", BASE)
    with pytest.raises(UsageError, match="kind DoRA"):
        compare_weights(stored("dora", FACTORS, use_dora=True), base)
    far = stored("far", FACTORS, base_model_name_or_path="/nowhere/model")
    with pytest.raises(UsageError, match="adapter of /nowhere/model, which is not here"):
        compare_weights(far, base)
    assert compare_weights(far, far).equal
    code, _, err = invoke("capture", far, "-o", "a", "--prompt", "x")
    assert code == 2 and "adapter of /nowhere/model, which is not here" in " ".join(err.split())


@pytest.fixture
def adapter(stored, llama, tmp_path):
    """An adapter of a small Llama, and that model as PEFT merges it."""
    merged = tmp_path / "merged"
    shutil.copytree(llama, merged)
    tensors = load_file(merged / "model.safetensors")
    factors = {}
    for number, module in enumerate(MODULES):
        rows, columns = tensors[f"{module}.weight"].shape
        a = draw(RANK, columns, seed=number, size=0.1)
        b = draw(rows, RANK, seed=50 + number, size=0.1)
        factors[module] = a, b
        whole = tensors[f"{module}.weight"].float() + ALPHA / RANK * b @ a
        tensors[f"{module}.weight"] = whole.to(tensors[f"{module}.weight"].dtype)
    # of embeddings PEFT stores the base's own too
    place = stored("small", factors, r=RANK, base_model_name_or_path=str(llama))
    name = "model.embed_tokens"
    table = tensors[f"{name}.weight"]
    a = draw(RANK, len(table), seed=90, size=0.1)
    b = draw(table.shape[1], RANK, seed=91, size=0.1)
    more = {"base_layer.weight": table, "lora_embedding_A": a, "lora_embedding_B": b}
    file = place / "adapter_model.safetensors"
    more = {f"base_model.model.{name}.{part}": tensor for part, tensor in more.items()}
    save_file(load_file(file) | more, file)
    tensors[f"{name}.weight"] = (table.float() + ALPHA / RANK * (b @ a).T).to(table.dtype)
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    return place, merged


@pytest.mark.slow
def test_an_adapter_is_captured_merged_into_its_base(adapter, llama, tmp_path, invoke):
    """The run says so; it is the merged checkpoint's run, and another model than the base's."""
    place, merged = adapter
    options = {"prompts": [[1, 7, 8, 9]], "max_new_tokens": 2, "probe": False}
    a = capture(place, out=tmp_path / "a", **options)
    text = a.manifest.engine.facts["adapter"]
    assert text == f"LoRA, rank 4, alpha 8, merged into {llama}"
    assert text in " ".join(invoke("inspect", a.path)[1].split())
    b = capture(merged, out=tmp_path / "b", **options)
    assert compare_weights(place, b.path).same and compare_weights(place, merged).same
    verdict = compare(a, b).verdict
    assert verdict.kind in ("identical", "within_floor")
    base = compare(a, capture(llama, out=tmp_path / "c", **options)).verdict
    assert base.kind == "incomparable" and "other weights" in base.summary
    again = capture(place, like=a, out=tmp_path / "d", probe=False)
    assert compare(a, again).verdict.kind == "identical"
    with pytest.raises(ModelError, match="names its base"):
        capture(like=a, out=tmp_path / "e", probe=False)
    assert invoke("capture", place, "--prompt", "x", "-o", tmp_path / "f", "--dry-run")[0] == 0


def test_an_adapter_of_another_model_is_not_merged(adapter, stored, llama, tmp_path):
    """Its parameters are not there, or of other shapes."""
    other = stored("odd", FACTORS, r=RANK, base_model_name_or_path=str(llama))
    with pytest.raises(UsageError, match=r"changes model\.layers\.0\.self_attn\.q_proj\.weight"):
        capture(other, out=tmp_path / "a", prompts=[[1, 7, 8, 9]], probe=False)
