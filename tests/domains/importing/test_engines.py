"""What the tools of other engines dump, held against a capture of the same forward."""

import contextlib
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, model_addition_debugger_context

from divergence import compare, import_dump
from divergence.errors import DumpError, UsageError
from tests.domains.importing.writers import (
    PROMPT_IDS,
    write_msprobe,
    write_sglang,
    write_sglang_dumper,
)

FIXTURES = Path(__file__).parent / "fixtures"
WRITERS = {"sglang": write_sglang, "sglang-dumper": write_sglang_dumper, "msprobe": write_msprobe}


def debugged(tiny_model, folder: Path, **options) -> Path:
    """A dump by the installed transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama", num_blocks=2), attn_implementation="eager"
    ).eval()
    with (
        torch.no_grad(),
        contextlib.redirect_stdout(io.StringIO()),
        model_addition_debugger_context(model, debug_path=str(folder), **options),
    ):
        model.forward(input_ids=torch.tensor([PROMPT_IDS]), use_cache=True)
    return folder


@pytest.mark.parametrize("layout", WRITERS)
def test_the_same_forward_is_identical(captured, tmp_path, layout):
    """Every format is recognised, and compares bit for bit with the run it was written from."""
    WRITERS[layout](captured, tmp_path / "dump")
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
    assert run.manifest.tokens.samples[0].prompt_ids == PROMPT_IDS
    assert (
        run.manifest.tokens.samples[0].generated_ids
        == (captured.manifest.tokens.samples[0].generated_ids[:2])
    )
    report = compare(captured, run)
    assert report.verdict.kind == "identical", report.verdict.summary
    assert not report.coverage.num_skipped
    sites = {record.site for record in run.records}
    assert {"model.layers.0:out", "model.layers.1:out", "model.layers.1:in"} <= sites
    assert run.verify() == []


@pytest.mark.parametrize("layout", WRITERS)
def test_a_fault_is_found_at_its_block(captured, faulty, tmp_path, layout):
    """Free runs alone: the block is named, and never with certainty, since nobody knows the
    weights."""
    WRITERS[layout](faulty, tmp_path / "dump")
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
    verdict = compare(captured, run).verdict
    assert verdict.kind == "localized", verdict.summary
    assert verdict.onset.block == "model.layers.1"
    assert verdict.confidence == "low"
    assert any("weights" in check.detail for check in verdict.checks if check.state == "not_made")


def test_real_msprobe(captured, tmp_path, told):
    """A dump by mindstudio-probe 26.2.0."""
    with tarfile.open(FIXTURES / "msprobe.tar.xz") as archive:
        archive.extractall(tmp_path / "dump", filter="data")
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured, progress=told)
    assert told.notes == ["42 tensors were parameters, and left out"]
    theirs = {record.site for record in captured.records}
    assert {record.site for record in run.records} <= theirs
    report = compare(captured, run)
    assert report.verdict.kind in ("identical", "within_floor"), report.verdict.summary
    assert report.coverage.num_compared == 164


def test_order_of_msprobe(captured, tmp_path):
    """A module's inputs come before what is inside it, as in a capture."""
    with tarfile.open(FIXTURES / "msprobe.tar.xz") as archive:
        archive.extractall(tmp_path / "dump", filter="data")
    run = import_dump(tmp_path / "dump", out=tmp_path / "b")
    sites = [record.site for record in run.records if record.step == 0]
    wanted = [r.site for r in captured.records if r.step == 0 and r.site in sites]
    assert sites == wanted


def test_real_debugger(captured, tiny_model, tmp_path, told):
    """A dump by transformers' debugger: outputs of blocks are taken from the next module's input,
    where they have one tensor in the run, and that is said."""
    dump = debugged(tiny_model, tmp_path / "dump", do_prune_layers=False, use_repr=False)
    run = import_dump(dump, out=tmp_path / "b", like=captured, progress=told)
    assert told.notes == [
        "2 tensors that blocks return were taken from the next module's input, which has the same "
        "bits in RUN"
    ]
    report = compare(captured, run)
    assert report.verdict.kind in ("identical", "within_floor"), report.verdict.summary
    assert {"model.layers.0:out", "model.layers.1:out", ".:out"} <= {r.site for r in run.records}


@pytest.mark.slow
def test_blocks_that_the_debugger_prunes(tiny_model, tmp_path):
    """Its tree leaves out all but the first and last block; their files are read all the same."""
    model = tiny_model("llama", num_blocks=4)
    dump = debugged(lambda *_, **__: model, tmp_path / "dump", use_repr=False)
    run = import_dump(dump, out=tmp_path / "b")
    assert {f"model.layers.{n}.mlp.down_proj:out" for n in range(4)} <= {
        record.site for record in run.records
    }


@pytest.mark.slow
def test_printed_tensors_are_statistics(tiny_model, tmp_path, told):
    """As the debugger writes by default: four digits of mean, std, min and max, also where the
    summary's tree alone was copied."""
    dump = debugged(tiny_model, tmp_path / "dump")
    run = import_dump(dump, out=tmp_path / "a", progress=told)
    assert any("printed statistics" in note for note in told.notes)
    assert 1e-6 < run.manifest.plan.statistics_off < 1e-2
    kept = run.find(("free", 0, 0, "model.layers.1.mlp.down_proj:out"))
    assert kept.place is kept.xxh3 is None and kept.summary.rms > 0
    next(dump.glob("*FULL_TENSORS.json")).unlink()
    again = import_dump(dump, out=tmp_path / "b")
    assert [record.summary for record in again.records] == [r.summary for r in run.records]
    verdict = compare(run, again).verdict
    assert (verdict.kind, verdict.headline[0].code) == (
        "undetermined",
        "blocks.statistics_show_nothing",
    )


def test_a_forward_that_did_not_end(tiny_model, tmp_path):
    """Without its tree the debugger's dump is half written."""
    dump = debugged(tiny_model, tmp_path / "dump", use_repr=False)
    next(dump.glob("*FULL_TENSORS.json")).unlink()
    with pytest.raises(DumpError, match="the forward did not end"):
        import_dump(dump, out=tmp_path / "b")


@pytest.mark.parametrize("layout", WRITERS)
def test_ranks(captured, tmp_path, told, layout):
    """What both ranks hold is taken once, parts are left out and counted."""
    WRITERS[layout](captured, tmp_path / "dump", ranks=2)
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured, progress=told)
    assert compare(captured, run).verdict.kind == "identical"
    parts = [note for note in told.notes if "not the same on all ranks" in note]
    assert len(parts) == (layout != "sglang-dumper")  # which has no parts here


def test_a_warm_up_is_left_out(captured, tmp_path, told):
    """A request before the one that RUN holds, by its tokens."""
    write_sglang(captured, tmp_path / "dump", warm_up=True)
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured, progress=told)
    assert any("1 forward of other prompts than RUN's left out" in note for note in told.notes), (
        told.notes
    )
    assert compare(captured, run).verdict.kind == "identical"


def test_other_prompts_block_the_comparison(captured, tmp_path):
    """Where none of the dump's prompts is RUN's, they are kept, and preflight says it."""
    write_sglang(captured, tmp_path / "dump", warm_up=True)
    for file in (tmp_path / "dump").rglob("Pass*.pt"):
        if file.name != "Pass00000.pt":
            file.unlink()
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
    report = compare(captured, run)
    assert report.verdict.kind == "incomparable"
    assert "the prompts differ" in report.verdict.summary


def test_what_enters_a_norm_comes_before_what_it_makes(captured, faulty, tmp_path):
    """Of two dumps of hooks, which see no block: its fault is not the norm's behind it."""
    runs = []
    for name, run in (("a", captured), ("b", faulty)):
        write_sglang(run, tmp_path / name)
        runs.append(import_dump(tmp_path / name, out=tmp_path / f"run-{name}"))
    assert compare(*runs).verdict.onset.site == "model.layers.1:out"


def test_layers_of_two_parts(captured, tmp_path):
    """Versions that keep a block's own output give (update, residual): their sum is it."""

    def damage(rank: int, held: dict) -> dict:
        hidden = held["model.layers.1.input_layernorm"][1]
        return {**held, "model.layers.0": [hidden / 2, hidden / 2]}

    write_sglang(captured, tmp_path / "dump", damage=damage)
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
    assert compare(captured, run).verdict.kind == "identical"


def test_norms_with_a_residual(captured, tmp_path):
    """A gated norm inside a sublayer has two inputs that are no sum."""
    second = {
        "model.layers.1.input_layernorm": "in",
        "model.layers.1.post_attention_layernorm": "in",
        "model.norm": "in",
        "model.layers.1.mixer.norm": "out.1",
        "model.layers.1.self_attn.q_norm": "out.1",
        "model.layers.1.mlp": "out.1",
    }
    x = torch.ones(len(PROMPT_IDS), 4)
    write_sglang(
        captured,
        tmp_path / "dump",
        damage=lambda rank, held: {**held, **{path: [x, 2 * x] for path in second}},
    )
    run = import_dump(tmp_path / "dump", out=tmp_path / "b")
    sites = {record.site.rpartition(":")[::2] for record in run.records}
    for path, port in second.items():
        assert {(path, "in"), (path, "out.1")} & sites == {(path, port)}


def test_tags_of_the_dumper_in_another_order(captured, tmp_path):
    """SGLang's own comparator writes name= first."""
    dump = tmp_path / "dump"
    write_sglang_dumper(captured, dump)
    for file in list(dump.rglob("*.pt")):
        tags = file.stem.split("___")
        first = next(tag for tag in tags if tag.startswith("name="))
        file.rename(file.with_name("___".join([first, *[t for t in tags if t != first]]) + ".pt"))
    run = import_dump(dump, out=tmp_path / "b", like=captured)
    assert compare(captured, run).verdict.kind == "identical"


def test_names_of_the_dumpers_author(captured, tmp_path, told):
    """A name given in dump() is a site by a [[key]] rule, with the tags as groups."""
    write_sglang_dumper(captured, tmp_path / "dump")
    (tmp_path / "map.toml").write_text('[[key]]\npattern = "my_hidden"\nsite = "model.norm:out"\n')
    run = import_dump(
        tmp_path / "dump",
        out=tmp_path / "b",
        map=tmp_path / "map.toml",
        like=captured,
        progress=told,
    )
    assert "model.norm:out" in {record.site for record in run.records}
    assert compare(captured, run).verdict.kind == "identical"


@pytest.mark.parametrize(
    ("layout", "pattern", "words"),
    [
        ("sglang", "TP0*/Pass00001.pt", "TP0 PP0 is missing at step 1"),
        ("sglang", "TP0*/*", "TP0 PP0 is missing"),
        ("sglang-dumper", "*/step=1___*", "step 1 is missing"),
        ("sglang-dumper", "*/*___rank=1___*", "rank 1 is missing"),
        ("sglang-dumper", "*/step=2___rank=1___*", "rank 1 is missing at step 2"),
        ("msprobe", "step1/*/dump.json", "without dump.json"),
        ("msprobe", "step1/*/*", "step 1 is missing"),
        ("msprobe", "step1/rank1/*", "rank 1 is missing at step 1"),
        ("msprobe", "*/rank0/*", "rank 0 is missing"),
        ("msprobe", "step2/rank1/dump_tensor_data/*embed_tokens*", "input.0.pt is missing"),
    ],
)
def test_what_is_missing_is_named(captured, tmp_path, layout, pattern, words):
    """Ranks, steps and files; nothing is written."""
    WRITERS[layout](captured, tmp_path / "dump", ranks=2)
    for path in list((tmp_path / "dump").glob(pattern)):
        for file in [path] if path.is_file() else list(path.rglob("*")):
            file.unlink() if file.is_file() else None
    with pytest.raises(DumpError, match=words):
        import_dump(tmp_path / "dump", out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.forward_batch_info.seq_lens": torch.tensor([3, 2])}, "2 sequences at once"),
        ({"model.forward_batch_info.positions": torch.arange(9, 14)}, "prefilled in parts"),
    ],
)
def test_forwards_that_are_not_one_prompt(captured, tmp_path, change, words):
    """A dump of several sequences in one forward is refused."""
    write_sglang(captured, tmp_path / "dump", damage=lambda rank, held: {**held, **change})
    with pytest.raises(DumpError, match=words):
        import_dump(tmp_path / "dump", out=tmp_path / "b")


def test_dumps_of_two_processes(captured, tmp_path):
    """Dumps of two processes in one folder are refused."""
    write_sglang(captured, tmp_path / "dump")
    write_sglang(captured, tmp_path / "dump", pids=(7,))
    with pytest.raises(DumpError, match="several processes"):
        import_dump(tmp_path / "dump", out=tmp_path / "b")


def test_a_name_that_leaves_the_dump(tmp_path):
    """dump.json names files of dump_tensor_data alone."""
    place = tmp_path / "dump" / "step0" / "rank0"
    place.mkdir(parents=True)
    entry = {"output": [{"type": "torch.Tensor", "data_name": "../../../../secret.pt"}]}
    data = {"Module.a.Linear.forward.0": entry}
    (place / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))
    with pytest.raises(DumpError, match="names no file of the dump"):
        import_dump(tmp_path / "dump", out=tmp_path / "b")


def test_what_a_dump_does_not_tell_is_unknown(captured, tmp_path):
    """Neither equal nor different: the weights, the code, the machine."""
    write_sglang(captured, tmp_path / "dump")
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
    lines = {line.check: line.status for line in compare(captured, run).preflight}
    for check in ("weights", "config", "model class", "code", "attention", "device", "torch"):
        assert lines[check] == "unknown", check
    assert lines["prompt ids"] == "same"
    other = import_dump(tmp_path / "dump", out=tmp_path / "c")
    assert {line.check: line.status for line in compare(other, run).preflight}[
        "weights"
    ] == "unknown"


def test_names_of_another_model(captured, tmp_path):
    """No site in common with RUN is an error, with the nearest names."""
    folder = tmp_path / "dump" / "TP0_PP0_Rank0_pid1"
    folder.mkdir(parents=True)
    torch.save({"model.layer.0.mlp.down": torch.ones(2, 3)}, folder / "Pass00000.pt")
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp"):
        import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
