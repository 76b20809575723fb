"""The truth that a run carries: what a capture makes of it, and what it says."""

import pytest
import torch

import divergence
from divergence.cli.main import app
from divergence.errors import ModelError, UsageError
from divergence.recording.engines import many_steps as module
from divergence.run.reader import own_truth
from divergence.run.writer import RunWriter

PROMPTS = ["A bridge is built twice.", "Once on paper, where every beam is exact."]


@pytest.fixture
def heard(tmp_path):
    """``heard(model, **options)`` → the run, and the notes of its capture."""

    def capture(model, **options):
        notes = []
        options = {"prompts": PROMPTS, "max_new_tokens": 3, "probe": False} | options
        run = divergence.capture(
            model if model is None else str(model),
            out=tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
            progress=lambda kind, done, total, text: notes.append(text) if kind == "note" else None,
            **options,
        )
        return run, notes

    return capture


def places(run, pass_):
    return {
        (record.sample, record.step, record.site): record
        for record in run.records
        if record.pass_ == pass_
    }


@pytest.mark.slow
def test_a_plain_capture_carries_its_truth(own_truths, heard, llama):
    """By default every block and what stands outside is there in float64, of all forwards."""
    run, notes = heard(llama, dtype="bfloat16")
    true, free = places(run, "truth"), places(run, "free")
    assert run.manifest.plan.passes == ["free", "truth", "floor"]
    assert run.manifest.plan.truth.num_steps == [3, 3]
    assert {record.dtype for record in true.values()} <= {"float64", "int64"}
    outputs = {place for place in free if place[2].endswith(":out")}
    assert outputs == {place for place in true if place[2].endswith(":out")}
    assert not notes
    assert not run.verify()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_fast_writer_takes_no_floor_away(heard, tiny_model, monkeypatch, architecture):
    """What a module returns may be what its last child returned: by then it may be written."""
    put = RunWriter.put

    def put_and_written(writer, item, **place):
        put(writer, item, **place)
        writer.drain()

    model, floors = tiny_model(architecture), []
    for write in (put, put_and_written):
        monkeypatch.setattr(RunWriter, "put", write)
        run, notes = heard(model, dtype="float32", sites=["modules"], truth="full")
        floors.append({(r.sample, r.site) for r in run.records if r.pass_ == "floor"})
        assert not notes
    assert floors[0] == floors[1]
    outer = {path for path, note in run.manifest.plan.modules.items() if note.role == "block"}
    assert outer <= {site.partition(":")[0] for _, site in floors[1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"batch": True}),
        ("llama", {"max_new_tokens": 12}),
        ("llama", {"use_cache": False}),
        ("llama", {"prefill_chunk": 4}),
        ("llama", {"attn_implementation": "sdpa"}),
        ("llama", {"sites": ["blocks", "ops@model.layers.1"]}),
        ("mixtral", {}),
        ("bert", {}),
        ("t5", {}),
        ("mamba", {}),
        ("llama", {"train": True, "max_new_tokens": None}),
        ("llama", {"train": True, "max_new_tokens": None, "optimizer": "adamw", "batch": True}),
        ("llama", {"train": True, "max_new_tokens": None, "autocast": "bfloat16"}),
    ],
    ids=str,
)
def test_it_is_what_a_truth_made_apart_has(heard, tiny_model, tmp_path, architecture, options):
    """A full truth has the numbers of both passes of `divergence truth`."""
    run, _ = heard(tiny_model(architecture), truth="full", **options)
    apart, own = divergence.truth(run, out=tmp_path / "apart"), own_truth(run)
    assert own.manifest.plan.passes == apart.manifest.plan.passes == ["free", "anchored"]
    assert own.manifest.plan.anchored_to == apart.manifest.plan.anchored_to == run.manifest.id
    for pass_ in apart.manifest.plan.passes:
        carried, wanted = places(own, pass_), places(apart, pass_)
        assert carried.keys() == wanted.keys()
        for place, record in carried.items():
            a, b = own.read(record), apart.read(wanted[place])
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_what_else_is_recorded_stays_as_it_was(heard, llama):
    """All other records are those of a capture without a truth, bit for bit."""
    with_truth, _ = heard(llama, truth="auto", whole=True, repeat=2)
    without, _ = heard(llama, truth="no", whole=True, repeat=2)
    for pass_ in ("free", "whole"):
        one, other = places(with_truth, pass_), places(without, pass_)
        assert {k: r.xxh3 for k, r in one.items()} == {k: r.xxh3 for k, r in other.items()}
    assert with_truth.manifest.repeatability == without.manifest.repeatability
    assert without.manifest.plan.truth is None


def test_auto_keeps_to_its_time(heard, llama, monkeypatch):
    """With no time to spend the first prompt's prefill is made, and the manifest says so."""
    monkeypatch.setattr("divergence.recording.api.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("divergence.recording.api.SHARE", 0.0)
    run, _ = heard(llama, truth="auto")
    assert run.manifest.plan.truth.num_steps == [1, 0]
    assert {place[:2] for place in places(run, "truth")} == {(0, 0)}


def test_a_truth_that_cannot_begin_leaves_the_run(heard, llama, monkeypatch):
    """A prompt whose attention in float64 the host has no memory for: the run says why."""

    def refuse(*_, **__):
        raise ModelError("a prompt of 9 tokens needs 99.0 GiB")

    monkeypatch.setattr("divergence.recording.api.check_ids", refuse)
    run, notes = heard(llama, truth="auto")
    assert run.manifest.complete and run.manifest.plan.passes == ["free"]
    assert run.manifest.plan.truth.num_steps == [0, 0]
    assert "99.0 GiB" in run.manifest.plan.truth.stopped_by
    assert any("the truth was not finished" in note for note in notes)


def test_prefills_come_first():
    """The steps of the first prompts leave time for the prefills of the others."""
    clock = iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: next(clock))
        allowance = module.Allowance(60.0, [4, 4, 4])
        for _ in range(3):
            assert allowance.begins()
            with pytest.raises(module.Enough):
                while True:
                    allowance.after_forward()
    assert all(number > 1 for number in allowance.num_steps)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"positions": "last:2"}, "token positions last:2"),
        ({"steps": "decode"}, "only the steps decode"),
        ({"sites": ["model.layers.0.mlp"]}, "no input of model.layers.0"),
        ({"engine": "compile", "engine_options": ["backend=eager"]}, "engine compile"),
    ],
    ids=str,
)
def test_where_there_can_be_none_the_reason_is_said(
    own_truths, heard, llama, capsys, options, reason
):
    """A capture that can make no truth says why, is complete, and holds the reason."""
    run, notes = heard(llama, **options)
    assert run.manifest.complete
    assert "truth" not in run.manifest.plan.passes
    (note,) = [note for note in notes if note.startswith("no truth: ") and reason in note]
    assert own_truth(run) is None
    with pytest.raises(SystemExit):
        app(["inspect", str(run.path)], prog_name="divergence")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"truth none: {note.removeprefix('no truth: ')}" in shown


@pytest.mark.parametrize("options", [{"positions": "last:2"}, {"sites": ["lm_head"]}], ids=str)
def test_without_inputs_to_start_from_the_free_run_is_left(heard, llama, options):
    """A full truth that cannot be anchored says why, and is free."""
    run, notes = heard(llama, truth="full", **options)
    assert run.manifest.plan.passes == ["free", "truth_free"]
    assert [note for note in notes if note.startswith("no anchored truth: ")]
    assert places(run, "truth_free").keys() <= places(run, "free").keys()
    assert own_truth(run).manifest.plan.anchored_to is None


@pytest.mark.slow
def test_a_repeated_run_makes_none_unless_told(own_truths, heard, llama):
    """One truth is enough: `--like` makes none, and one where it is asked for."""
    a, _ = heard(llama)
    b, notes = heard(None, like=a, prompts=())
    assert "truth" not in b.manifest.plan.passes
    assert not [note for note in notes if "truth" in note]
    told, _ = heard(None, like=a, prompts=(), truth="full")
    assert "truth" in told.manifest.plan.passes


@pytest.mark.slow
def test_a_fault_far_beyond_rounding_is_said_at_capture(heard, llama):
    """A block whose own float64 is far from its free pass is named, with how far."""
    fault = "model.layers.1.mlp:out=scale:1.5"
    _, notes = heard(llama, truth="auto", plants=[fault], dtype="float32")
    assert [note for note in notes if note.startswith("model.layers.1: its float64 differs")]


@pytest.mark.slow
def test_a_residual_in_float32_of_16_bit_products_is_no_fault(heard, tiny_model):
    """A block hands on float32, and computes in bfloat16: that is what its rounding is."""
    run, notes = heard(tiny_model("mamba"), truth="auto", dtype="bfloat16")
    (dtype,) = {
        r.dtype
        for r in run.records
        if r.coordinates[1:] == (0, 0, "backbone.layers.1:out") and r.pass_ == "free"
    }
    assert (run.manifest.model.dtype, dtype) == ("bfloat16", "float32")
    assert not notes


def test_an_unknown_mode_is_refused(heard, llama):
    """--truth takes four words."""
    with pytest.raises(UsageError, match="--truth half"):
        heard(llama, truth="half")


@pytest.mark.parametrize(("mode", "passes"), [(None, ["free", "truth", "floor"]), ("no", ["free"])])
def test_a_dry_run_says_whether_there_will_be_one(own_truths, llama, dry_run, mode, passes):
    """The plan lists the pass, and that its bytes come on top."""
    plan = dry_run(llama, "--prompt", PROMPTS[0], *(["--truth", mode] if mode else []))
    assert plan["passes"] == passes
    assert any("truth" in note for note in plan["notes"]) == (mode is None)


@pytest.mark.parametrize(
    ("options", "made", "word"),
    [
        (["bfloat16"], True, "4 bytes a number"),
        (["float32"], False, "in float32, as such a pass would be"),
        (["bfloat16", "--store", "sketch"], False, "--store sketch keeps no bytes"),
    ],
)
def test_a_dry_run_says_whether_it_will_be_escalated(llama, dry_run, options, made, word):
    """The plan lists the pass or says why there is none, as the capture does."""
    words = llama, "--prompt", PROMPTS[0], "--escalate", "--truth", "no", "--dtype"
    plan = dry_run(*words, *options)
    assert plan["passes"] == ["free", "escalated"][: 1 + made]
    assert any(word in note for note in plan["notes"])


@pytest.mark.slow
@pytest.mark.whole
def test_a_step_that_is_cut_short_has_no_gradients_of_parameters(heard, llama, monkeypatch):
    """Those are of all prompts together: what the first alone gives is not recorded as theirs."""
    monkeypatch.setattr("divergence.recording.api.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("divergence.recording.api.SHARE", 0.0)
    run, _ = heard(llama, truth="auto", train=True, max_new_tokens=None)
    sites = {site for _, _, site in places(run, "truth")}
    assert run.manifest.plan.truth.num_steps == [1, 0]
    assert "model.layers.1#backward:out" in sites
    assert not [site for site in sites if "#backward:out." in site]
    full, _ = heard(llama, truth="full", train=True, max_new_tokens=None)
    assert [site for _, _, site in places(full, "truth") if "#backward:out." in site]


@pytest.mark.slow
def test_a_fused_kernel_is_asked_for_nothing(heard, llama):
    """An attention kernel without float64 makes the free pass alone: the truth has `eager`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    dtypes, models = [], []

    def fused(module, query, *args, **kwargs):
        dtypes.append(query.dtype)
        return sdpa_attention_forward(module, query, *args, **kwargs)

    def prepare(model):
        model.set_attn_implementation("fused")
        models.append(model)

    AttentionInterface.register("fused", fused)
    AttentionMaskInterface.register("fused", sdpa_mask)
    run, notes = heard(llama, truth="full", attn_implementation="sdpa", prepare=prepare)
    assert set(dtypes) == {torch.bfloat16}
    assert models[0].config._attn_implementation == "fused"
    assert run.manifest.plan.truth.stopped_by is None, notes
    assert run.manifest.plan.truth.num_steps == [3, 3]
    assert run.manifest.model.attn_implementation == "fused"
    sdpa, _ = heard(llama, truth="full", attn_implementation="sdpa")
    own, wanted = places(run, "truth"), places(sdpa, "truth")
    assert own.keys() == wanted.keys()
    for place, record in own.items():
        torch.testing.assert_close(run.read(record), sdpa.read(wanted[place]), rtol=1e-9, atol=1e-9)
