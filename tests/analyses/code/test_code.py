"""Two runs whose code, configuration or build differ: preflight says so, and the verdict's why."""

import json
import shutil

import msgspec
import pytest

from divergence import Run, capture, compare
from divergence.analyses.code.find import code_evidence
from divergence.comparison.preflight import (
    code_differences,
    code_line,
    config_differences,
    config_line,
    first_difference,
    template_cause,
    weight_causes,
)
from divergence.facts import sentence, worded
from divergence.run.manifest import CodeNote, ModuleNumbers

V3 = "tests/fixtures/run-v3"


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """(reference, candidate whose second MLP was replaced by code that is 2% off)."""
    folder = tiny_model("llama", dtype="float32")
    out = tmp_path_factory.mktemp("runs")
    options = {"prompts": ["one two three"], "max_new_tokens": 2, "probe": False}
    a = capture(folder, out=out / "a", **options)

    def prepare(model):
        mlp = model.model.layers[1].mlp
        original = mlp.forward
        mlp.forward = lambda x: original(x) * 1.02

    b = capture(like=a, out=out / "b", prepare=prepare, probe=False)
    return a, b


@pytest.fixture
def manifests(runs):
    """Two copies of a healthy manifest, to be changed."""
    encoded = msgspec.json.encode(runs[0].manifest)
    kind = type(runs[0].manifest)
    return tuple(msgspec.json.decode(encoded, type=kind) for _ in range(2))


def line_named(report, check):
    return next(line for line in report.preflight if line.check == check)


def test_replaced_code_is_the_first_difference_and_explains_the_onset(runs):
    """Who replaced what and where; not blocking, since it is often the very question."""
    report = compare(*runs)
    differing = [line for line in report.preflight if line.status != "same"]
    assert differing[0].check == "code"
    assert "LlamaMLP.forward was replaced by test_code.py:" in differing[0].detail
    assert differing[0].detail.endswith("in model.layers.1.mlp on B")
    assert (report.verdict.kind, report.verdict.onset.block) == ("localized", "model.layers.1")
    said = [one.text for one in report.verdict.evidence if "runs other code" in one.text]
    assert len(said) == 1
    assert "LlamaMLP.forward was replaced by test_code.py:" in said[0]


def test_another_block_is_not_explained_by_it(runs):
    """Only the block that holds the replaced module runs other code."""
    a, b = (run.manifest for run in runs)
    assert code_evidence(a, b, "model.layers.1")
    assert not code_evidence(a, b, "model.layers.0")
    assert sentence(code_evidence(a, b, None)[0]).startswith("other code: LlamaMLP.forward")


def test_equal_code_says_nothing(runs, manifests):
    """One line, the same."""
    line = code_line(*manifests)
    assert (line.status, line.detail) == ("same", None)
    assert code_differences(*manifests) == []


def test_a_run_that_does_not_say_is_not_blamed(runs):
    """Runs of older versions recorded no code."""
    line = code_line(runs[0].manifest, Run.open(V3).manifest)
    assert (line.status, line.candidate) == ("same", "not recorded")
    assert code_evidence(runs[0].manifest, Run.open(V3).manifest, "model.layers.0") == []


def test_other_versions_are_counted_not_listed(manifests):
    """Almost every class differs in text between two versions of a library."""
    a, b = manifests
    for note in b.model.code.values():
        note.digest, note.functions = "other", {"forward": "other"}
    b.environment.versions["transformers"] = "4.0"
    line = worded(code_line(a, b))
    assert line.status == "differs"
    assert "other code in 10 classes (transformers " in line.detail
    assert "/ 4.0)" in line.detail


def test_the_function_that_differs_is_named(manifests):
    """And a class that stands in another's place."""
    a, b = manifests
    b.model.code["LlamaAttention"].digest = "other"
    b.model.code["LlamaAttention"].functions["rotate_half"] = "other"
    norm = b.model.code.pop("LlamaRMSNorm")
    b.model.code["LigerRMSNorm"] = CodeNote(
        digest="x",
        origin="liger_kernel.transformers.rms_norm",
        functions={"forward": "x"},
        places=norm.places,
    )
    line = worded(code_line(a, b))
    assert "other code of rotate_half" in line.detail
    assert (
        "LigerRMSNorm (liger_kernel.transformers.rms_norm) only on B in place of "
        "LlamaRMSNorm" in line.detail
    )
    texts = [sentence(item) for item in code_evidence(a, b, "model.layers.2")]
    assert any("rotate_half" in text for text in texts)


def test_adapters_and_compilers_count_as_other_code(manifests):
    """Where weights were placed does not."""
    a, b = manifests
    b.model.code["Linear"].wrapped = ["accelerate: AlignDevicesHook (3 of 22)"]
    assert code_line(a, b).status == "same"
    b.model.code["Linear"].wrapped = ["LoRA style, not merged (4 of 22)"]
    b.model.code["LlamaMLP"].compiled = "torch.compile (inductor)"
    detail = worded(code_line(a, b)).detail
    assert "Linear: LoRA style, not merged (4 of 22), on B" in detail
    assert "LlamaMLP: not compiled on A, torch.compile (inductor) on" in detail


def numbers(usual: str, others: dict[str, list[int]]) -> ModuleNumbers:
    """Of four attention modules."""
    return ModuleNumbers(
        value=usual,
        num_modules=4,
        others={
            value: [f"model.layers.{layer}.self_attn" for layer in layers]
            for value, layers in others.items()
        },
    )


def test_numbers_and_functions_of_torch_count(manifests):
    """A scale that differs; a function of torch that was replaced concerns every block."""
    a, b = manifests
    b.model.code["LlamaAttention"].attributes["scaling"] = "0.26"
    b.model.code["torch.nn.functional"] = CodeNote(
        digest="x", origin="torch", replaced=["torch.matmul was replaced by plugin.py:1"]
    )
    detail = worded(code_line(a, b)).detail
    assert "LlamaAttention.scaling 0.25 / 0.26" in detail
    assert "torch.matmul was replaced by plugin.py:1 on B" in detail
    texts = [sentence(item) for item in code_evidence(a, b, "model.layers.0")]
    assert any("torch.matmul was replaced" in text for text in texts)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (numbers("16", {"None": [1]}), numbers("17", {"None": [1]}), "16 / 17"),
        (
            numbers("16", {"None": [1, 3]}),
            numbers("None", {"16": [0], "17": [2]}),
            "16 / 17 in model.layers.2.self_attn",
        ),
        ("0.25", numbers("0.25", {"0.26": [1, 2]}), "0.25 / 0.26 in 2 modules"),
        ("50.0", "None", "50.0 / None"),
        # of an earlier version, which told the modules in words: nothing is claimed
        ("16; None in model.layers.1.self_attn", numbers("16", {"None": [1]}), None),
    ],
)
def test_a_number_that_some_modules_hold_is_compared_module_by_module(manifests, a, b, text):
    """A window that every other layer has, one too wide in one of them or in all."""
    first, second = manifests
    first.model.code["LlamaAttention"].attributes["sliding_window"] = a
    second.model.code["LlamaAttention"].attributes["sliding_window"] = b
    detail = worded(code_line(first, second)).detail
    assert detail == (text and f"LlamaAttention.sliding_window {text}")


# --- the configuration -------------------------------------------------------------------------


def test_keys_that_differ_are_printed(manifests):
    """Dotted, with both values."""
    a, b = manifests
    b.model.config_digest = "other"
    b.model.config["rope_parameters.rope_theta"] = 100000.0
    line = worded(config_line(a, b))
    assert line.status == "differs"
    assert line.detail == "rope_parameters.rope_theta 10000 / 100000"


def test_a_key_that_moved_is_found_by_its_last_name():
    """As ``rope_theta`` between two versions of transformers: equal values are no difference."""
    old, new = {"rope_theta": 100000.0, "a": 1}, {"rope_parameters.rope_theta": 10000.0, "a": 1}
    found, moved = config_differences(old, new)
    assert [*map(sentence, found)] == [
        "rope_theta 100000 / 10000 (rope_theta, there rope_parameters.rope_theta)"
    ]
    assert moved == 0
    assert config_differences(old, {**new, "rope_parameters.rope_theta": 100000.0}) == ([], 1)


def test_a_moved_key_alone_is_the_same_configuration(manifests):
    """The digests differ, the values do not."""
    a, b = manifests
    b.model.config_digest = "other"
    b.model.config["rope_theta"] = b.model.config.pop("rope_parameters.rope_theta")
    line = worded(config_line(a, b))
    assert (line.status, line.detail) == ("same", "the same values, 1 of them under other keys")


def test_the_rotary_base_is_named_end_to_end(tiny_model, tmp_path):
    """Two checkpoints of the same weights with another rope_theta: A's truth has A's, and does not
    tell whose is meant."""
    folder = tiny_model("llama", dtype="float32")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_theta"] = 500000.0
    config.pop("rope_parameters", None)
    (other / "config.json").write_text(json.dumps(config))
    options = {"prompts": ["one two three"], "max_new_tokens": 1, "probe": False}
    a = capture(folder, out=tmp_path / "a", truth="full", **options)
    b = capture(str(other), like=a, out=tmp_path / "b", probe=False)
    report = compare(a, b)
    assert "rope_theta 10000 / 500000" in line_named(report, "config").detail
    assert (report.verdict.kind, report.verdict.side) == ("localized", None)
    assert "code.numbers_in_doubt" in {item.code for item in report.verdict.evidence}


@pytest.mark.slow
def test_two_rotary_bases_of_a_configuration_name_no_side(tiny_model, tmp_path):
    """Of full and of sliding attention: two derived tensors differ, each in its own way."""
    folder = tiny_model("gemma3", dtype="float32")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    config |= {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    (other / "config.json").write_text(json.dumps(config))
    options = {"prompts": ["one two three four five six"], "max_new_tokens": 1, "probe": False}
    a = capture(folder, out=tmp_path / "a", truth="full", **options)
    verdict = compare(a, capture(str(other), like=a, out=tmp_path / "b", probe=False)).verdict
    assert (verdict.kind, verdict.side) == ("localized", None)
    assert "code.numbers_in_doubt" in {item.code for item in verdict.evidence}


# --- names of what is suspected ----------------------------------------------------------------


def test_one_trained_layer_is_named(manifests):
    """All differing weights in one block."""
    a, b = (one.model for one in manifests)
    for name in b.digests:
        if name.startswith("model.layers.1.mlp"):
            b.digests[name] = "other"
    assert [*map(sentence, weight_causes(a, b))] == [
        "all of them in model.layers.1: as after training this layer further"
    ]


def test_a_merged_adapter_is_named(manifests):
    """Few kinds of weights, in every block."""
    a, b = (one.model for one in manifests)
    for name in b.digests:
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            b.digests[name] = "other"
    assert [*map(sentence, weight_causes(a, b))] == [
        "only self_attn.q_proj.weight, self_attn.v_proj.weight, in every block: as after merging "
        "an adapter"
    ]


def test_an_adapter_that_is_not_merged_is_named(manifests):
    """By the names of its weights."""
    a, b = (one.model for one in manifests)
    b.digests["model.layers.0.self_attn.q_proj.lora_A.style.weight"] = "x"
    b.code["Linear"].wrapped = ["LoRA style, not merged (2 of 22)"]
    assert [*map(sentence, weight_causes(a, b))] == [
        "B holds 1 adapter weights (LoRA style, not merged)"
    ]


def test_a_padded_vocabulary_is_named(manifests):
    """More rows than there are tokens."""
    a, b = (one.model for one in manifests)
    b.embedding_rows = b.head_rows = 576
    assert [*map(sentence, weight_causes(a, b))] == [
        "the vocabulary of 512 tokens is padded otherwise: 512 rows of the embedding / 576"
    ]


def test_untied_weights_are_named(manifests):
    """One tensor on one side, two different ones on the other."""
    a, b = (one.model for one in manifests)
    a.tied = [["model.embed_tokens.weight", "lm_head.weight"]]
    b.digests["lm_head.weight"] = "x"
    assert sentence(weight_causes(a, b)[0]) == (
        "model.embed_tokens.weight and lm_head.weight are tied on A, and differ on B"
    )


def test_another_template_shows_where_its_text_begins_to_differ(manifests):
    """On a fixed conversation, so also where the tokens were forced."""
    a, b = manifests
    b.model.chat_example = a.model.chat_example.replace("user", "User")
    place = a.model.chat_example.index("user")
    said = sentence(template_cause(a, b))
    assert said.startswith(f"rendered text differs from character {place} on: ")
    assert "user" in said.partition(" against ")[0]
    assert "User" in said.partition(" against ")[2]


def test_first_difference_of_two_texts():
    """With what stands before it, and where one text ends."""
    assert sentence(first_difference("abc", "abd")) == "from character 2 on: 'abc' against 'abd'"
    assert sentence(first_difference("ab", "abcd")) == "from character 2 on: 'ab' against 'abcd'"
    assert sentence(first_difference("x" * 100, "x" * 50 + "y" * 50)).startswith(
        "from character 50 on: '…x"
    )


@pytest.mark.slow
def test_numbers_that_differ_leave_open_whose_are_meant(drawn_model, tmp_path):
    """A's truth has A's numbers. By a configuration that both have B is wrong, with less
    confidence, since it may be wrong itself. A module of B's whose value neither A's nor its kin
    hold is the odd one."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4}
    models = {
        name: str(drawn_model(**sizes, rms_norm_eps=eps))
        for name, eps in (("right", 1e-5), ("wrong", 1e-2))
    }
    how = {"prompts": [list(range(3, 30))], "max_new_tokens": 2, "dtype": "float32"}

    def changed(model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-2

    def one_changed(model):
        model.model.layers[2].input_layernorm.variance_epsilon = 1e-2

    def scaled(model):
        for layer in model.model.layers:
            layer.self_attn.scaling *= 1.5  # it was 1/√ of head_dim, which stands in the config

    sides = {}
    for name, first, second, prepare in (
        ("other config", "wrong", "right", None),
        ("every module", "right", None, changed),
        ("every scale", "right", None, scaled),
        ("one module", "right", None, one_changed),
    ):
        out = tmp_path / name
        a = capture(models[first], out=out / "a", probe=False, truth="full", **how)
        b = capture(models.get(second), like=a, out=out / "b", probe=False, prepare=prepare)
        verdict = compare(a, b).verdict
        assert verdict.kind == ("localized" if name == "one module" else "systematic")
        codes = [item.code for item in verdict.evidence]
        sides[name] = verdict.side, verdict.confidence, "code.numbers_stated" in codes
        assert ("code.numbers_in_doubt" in codes) == (verdict.side is None)
    assert sides == {
        "other config": (None, "medium", False),
        "every module": ("candidate", "medium", True),
        "every scale": ("candidate", "medium", True),
        "one module": ("candidate", "high", False),
    }


@pytest.mark.slow
def test_a_number_that_stands_in_the_configuration_by_chance_names_no_side(
    drawn_model, answer, tmp_path
):
    """A forgot the scale of attention: its 1.0 is in every configuration, for something else. B's
    right one is 1/√ of a size that this configuration does not hold."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 128}
    model = drawn_model("GPTNeoX", **sizes)

    def unscaled(model):
        for layer in model.gpt_neox.layers:
            layer.attention.scaling = 1.0

    a = capture(
        str(model),
        out=tmp_path / "a",
        prompts=[list(range(3, 24))],
        max_new_tokens=1,
        dtype="float32",
        probe=False,
        truth="full",
        prepare=unscaled,
    )
    verdict = answer(a).verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("systematic", None, "medium")
    assert "code.numbers_in_doubt" in {item.code for item in verdict.evidence}
