"""The command under `next` can work with the runs that it names."""

import pytest
import torch

from divergence import RecordOptions, capture, compare
from divergence.errors import RunFormatError
from divergence.recording.engines.load import Loading, load_model


@pytest.fixture
def first(shared_run):
    return shared_run(prompts=["Snow fell on"], max_new_tokens=2, probe=False)


@pytest.mark.parametrize(
    "plant",
    ["lm_head:out=scale:1.5", "model.embed_tokens:out=scale:1.5", "model.norm:out=scale:1.5"],
)
def test_what_lies_outside_blocks_is_localized(first, plant, answer):
    """A tensor alone tells nothing; `localize` leads to the operator."""
    verdict = answer(first, plants=[plant]).verdict
    assert verdict.kind == "localized"
    assert verdict.next[0].startswith("divergence localize ")


def test_nan_is_localized(first, answer):
    """As any other error is."""

    def spoil(model):
        model.model.layers[1].mlp.register_forward_hook(lambda *args: args[2] * float("nan"))

    verdict = answer(first, spoil).verdict
    assert verdict.kind == "nonfinite"
    assert verdict.next[0].startswith("divergence localize ")


def test_a_pair_made_of_tensors_is_not_captured_again(tmp_path, llama, invoke):
    """Its inputs are in no run: what is next looks at the tensors, and the error says why."""
    model = load_model(Loading(str(llama))).module
    inputs = [{"input_ids": torch.tensor([[5, 6, 7, 8]]), "use_cache": False}]
    a = capture(model, inputs=inputs, out=tmp_path / "a")
    model.model.layers[1].mlp.down_proj.weight.data *= 1.1
    verdict = compare(a, capture(model, inputs=inputs, out=tmp_path / "b"), force=True).verdict
    assert verdict.kind in ("localized", "systematic")
    for command in verdict.next:
        assert command.startswith("divergence inspect ")
        assert invoke(*command.partition("   #")[0].split()[1:])[0] == 0
    assert "capture --like" not in invoke("inspect", str(a.path))[1]
    with pytest.raises(RunFormatError, match="has no tokens") as caught:
        capture(like=a, out=tmp_path / "c")
    assert "divergence.record(" in caught.value.hint


@pytest.mark.parametrize("faulty", ["reference", "candidate"])
def test_a_truth_is_offered_where_it_can_tell(tmp_path, llama, faulty, answer):
    """It has A's code: where that was replaced, it cannot tell which code is meant."""

    def change(model):
        mlp = model.model.layers[1].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) * 1.05

    prepare = {"reference": (change, None), "candidate": (None, change)}[faulty]
    a = capture(
        llama,
        out=tmp_path / "a",
        prompts=["Snow fell on"],
        max_new_tokens=2,
        probe=False,
        prepare=prepare[0],
    )
    offered = [c for c in answer(a, prepare[1]).verdict.next if c.startswith("divergence truth ")]
    assert any("-deep" not in command for command in offered) == (faulty == "candidate")


@pytest.mark.slow
@pytest.mark.whole
def test_nothing_is_offered_that_cannot_work(tmp_path, llama, invoke):
    """No measuring of runs that have no tensor in common, no repeating of a run that no capture
    makes, nothing of a damaged run."""
    model = capture(
        llama,
        out=tmp_path / "model",
        prompts=["Snow fell on"],
        max_new_tokens=1,
        probe=False,
        dtype="float32",
        truth="no",
    )
    suite = capture("suite:quick", out=tmp_path / "suite", sites=["argmax.float32.odd*"])
    for pair, kinds in (((model, suite), "AB"), ((suite, model), "BA")):
        apart = compare(*pair).verdict
        assert (apart.kind, apart.next) == ("incomparable", [])
        assert apart.summary == "{} is a run of a model, and {} of operators alone".format(*kinds)
    code, _, err = invoke("probe", "-o", "probe", "--quick")
    assert code == 0, err
    assert compare("probe", "probe").verdict.next == []
    assert compare(suite, suite).verdict.next[0].startswith("divergence capture --like ")
    tensors = max((suite.path / "tensors").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    code, out, _ = invoke("inspect", str(suite.path), "--verify")
    assert code == 2 and "DAMAGED" in out and "next" not in out.splitlines()


CASES = {
    "healthy": {},
    "one block": {"plants": ["model.layers.1.mlp:out=scale:1.3"]},
    "one prompt": {"plants": ["model.layers.1.mlp:out=scale:1.3@sample=1"]},
    "every block": {"plants": [f"model.layers.{n}.mlp:out=scale:1.5" for n in range(2)]},
    "nan": {"plants": ["model.layers.1.mlp:out=nan:3"]},
    "the head": {"plants": ["lm_head:out=scale:1.5"]},
    "another dtype": {"dtype": "bfloat16"},
    "prefill alone": {"steps": "prefill", "plants": ["model.layers.1:out=scale:1.2"]},
}
"""What is done to the second run."""


@pytest.mark.parametrize(
    ("case", "store"),
    [(case, "full") for case in CASES]
    + [(case, store) for case in ("healthy", "one block") for store in ("sketch", "stats", "hash")],
)
def test_every_command_that_compare_offers_works(tmp_path, llama, follow, case, store):
    """In the order in which the whole answer prints them."""
    a = capture(
        llama,
        out=tmp_path / "a",
        prompts=["Snow fell on", "One"],
        max_new_tokens=2,
        probe=False,
        store=store,
        dtype="float32",
    )
    capture(like=a, out=tmp_path / "b", probe=False, **CASES[case])
    tried = follow("compare", "a", "b", "-v")
    assert tried or case == "healthy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("inspect a", "compare"),
        pytest.param("doctor a b", "localize", marks=pytest.mark.whole),
        ("compare a b b", "compare"),
        ("compare a b --truth a", ""),
        ("capture --like a -o c --no-probe", "compare"),
        ("truth a -o t", "compare"),
        ("compare a", ""),
    ],
)
def test_every_command_that_others_offer_works(tmp_path, llama, follow, words, needed):
    """Of one run, of many, and of what makes a run."""
    a = capture(
        llama,
        out=tmp_path / "a",
        prompts=["Snow fell on"],
        max_new_tokens=2,
        probe=False,
        recording=RecordOptions(whole=True),
        dtype="float32",
        truth="full",
    )
    capture(like=a, out=tmp_path / "b", probe=False, plants=["model.layers.1.mlp:out=scale:1.3"])
    tried = follow(*words.split())
    assert not needed or any(command.split()[1] == needed for command in tried), tried


JOURNEYS = {
    "suite": (
        "capture suite:quick -o a --sites rms_norm.float32.odd* --sites argmax.*odd*",
        "capture --like a -o b --impl rms_norm=mine:rms_norm",
        "compare a b",
    ),
    "probe": ("probe -o b --quick", "probe -o a --quick"),
    "training": (
        "capture MODEL -o a --train --no-probe",
        "capture --like a -o b --no-probe --plant model.layers.1.mlp:out=scale:1.3",
        "compare a b -v",
    ),
    "a training step alone": ("capture MODEL -o b --train --no-probe", "capture --like b -o a"),
    "sensitivity": (
        "capture MODEL -o a --dtype bfloat16 --no-probe --truth no --max-new-tokens 2",
        "capture --like a -o b --attn-implementation sdpa --no-probe",
        "sensitivity a --candidate b --faults scale --blocks 0",
    ),
    "selfcheck": ("selfcheck MODEL --only again,attention --max-new-tokens 2",),
    "collectives": (
        "capture suite:collectives --ranks 2 -o a --sites all_reduce.float32.odd* "
        "--plant all_reduce=bfloat16@1",
        "compare a",
    ),
    "selfcheck that keeps its runs": (
        "selfcheck MODEL --only attention --max-new-tokens 2 --keep runs",
    ),
}
"""Commands; of the last one, what it offers is run as well."""
WHOLE = ("suite", "probe", "training", "alone", "collectives")


@pytest.mark.parametrize(
    "journey",
    [
        pytest.param(name, marks=pytest.mark.whole if name.split()[-1] in WHOLE else ())
        for name in JOURNEYS
    ],
)
def test_every_command_that_an_experiment_offers_works(tmp_path, llama, invoke, follow, journey):
    """Suites, probes, training, sensitivity, selfcheck."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef rms_norm(x, weight, eps):\n    return x * weight\n"
    )
    (tmp_path / "prompts.txt").write_text("Snow fell on the town\n")
    *first, last = (
        [str(llama) if word == "MODEL" else word for word in command.split()]
        for command in JOURNEYS[journey]
    )
    for words in first:
        code, _, err = invoke(*words)
        assert code == 0, err
    assert follow(*last, FILE="prompts.txt")
