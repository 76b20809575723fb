"""Plain folders: which file is which site, by a map."""

import numpy
import pytest
import torch
from safetensors.torch import save_file

from divergence import compare, import_dump
from divergence.errors import ConfigError, DumpError, UsageError
from tests.domains.importing.writers import flat, forwards, write_npy


def test_a_folder_of_npy_is_the_run(captured, tmp_path, told):
    """Names of files give layer and step; the ids in the dump give the prompt."""
    names = write_npy(captured, tmp_path / "dump")
    run = import_dump(
        tmp_path / "dump", out=tmp_path / "b", map=names, like=captured, progress=told
    )
    assert (
        run.manifest.tokens.samples[0].prompt_ids == captured.manifest.tokens.samples[0].prompt_ids
    )
    report = compare(captured, run)
    assert report.verdict.kind in ("identical", "within_floor"), report.verdict.summary
    assert report.coverage.num_compared == 3 * 3
    assert told.notes == []


def test_keys_inside_files(captured, tmp_path):
    """One safetensors file a step, its keys by [[key]] rules; (T, H) is laid out as RUN has it."""
    (tmp_path / "dump").mkdir()
    for step, held in enumerate(forwards(captured)):
        tensors = {f"h{n}": flat(held[f"model.layers.{n}:out"]).contiguous() for n in (0, 1)}
        save_file(tensors, tmp_path / "dump" / f"step-{step}.safetensors")
    (tmp_path / "map.toml").write_text(
        '[[key]]\nfile = "step-{step}.safetensors"\npattern = "h{layer}"\n'
        'site = "model.layers.{layer}:out"\n'
    )
    run = import_dump(
        tmp_path / "dump", out=tmp_path / "b", map=tmp_path / "map.toml", like=captured
    )
    assert {record.shape for record in run.records} == {(1, 5, 64), (1, 1, 64)}
    report = compare(captured, run)
    assert report.verdict.kind == "identical"
    assert "prompt ids" in [line.check for line in report.preflight if line.status == "unknown"]


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (
            'pattern = "block_{layer}_step{step}.npy"\nsite = "a.{layer}:out"',
            UsageError,
            ["matches nothing", "layer_0_step0.npy"],
        ),
        (
            'pattern = "layer_{layer}_step{step}.npy"\nsite = "model.{layer}.hidden:out"',
            UsageError,
            ["none of the dump's 2 sites", "there: model."],
        ),
        (
            'pattern = "layer_{layer}_step{step}.npy"\nsite = "model.layers.{n}:out"',
            ConfigError,
            ["makes no site", "layer, step"],
        ),
        ('pattern = "layer_{layer}_step{layer}.npy"\nsite = "a:out"', ConfigError, ["no pattern"]),
        ('patern = "x"\nsite = "a:out"', ConfigError, ["did you mean pattern"]),
    ],
)
def test_a_map_that_does_not_fit(captured, tmp_path, rule, error, words):
    """What is wrong, and the names that are nearest; nothing is written."""
    write_npy(captured, tmp_path / "dump")
    (tmp_path / "map.toml").write_text(f"[[file]]\n{rule}\n")
    with pytest.raises(error) as caught:
        import_dump(tmp_path / "dump", out=tmp_path / "b", map=tmp_path / "map.toml", like=captured)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "b").exists()


def test_samples_are_those_of_the_map(captured, tmp_path):
    """A prompt that RUN has not is left out, whatever number the map gives it."""
    folder = tmp_path / "dump"
    folder.mkdir()
    held = forwards(captured)[0]
    for number, ids in enumerate((held["model:in"] + 1, held["model:in"])):
        numpy.save(folder / f"ids-{number}.npy", ids.numpy())
        numpy.save(folder / f"norm-{number}.npy", held["model.norm:out"].float().numpy())
    (tmp_path / "map.toml").write_text(
        '[[file]]\npattern = "ids-{sample}.npy"\nsite = "model:in"\n'
        '[[file]]\npattern = "norm-{sample}.npy"\nsite = "model.norm:out"\n'
    )
    run = import_dump(folder, out=tmp_path / "b", map=tmp_path / "map.toml", like=captured)
    assert [(r.sample, r.site) for r in run.records] == [(0, "model:in"), (0, "model.norm:out")]


def test_without_a_map(captured, tmp_path):
    """Files of tensors need a map of names to sites."""
    write_npy(captured, tmp_path / "dump")
    with pytest.raises(UsageError, match="needs a map"):
        import_dump(tmp_path / "dump", out=tmp_path / "b")


def test_a_missing_step(captured, tmp_path):
    """Steps 0 and 2 without 1 are no dump."""
    names = write_npy(captured, tmp_path / "dump")
    for file in (tmp_path / "dump").glob("*step1.npy"):
        file.unlink()
    with pytest.raises(DumpError, match="step 1 is missing"):
        import_dump(tmp_path / "dump", out=tmp_path / "b", map=names)


def test_samples_and_ranks_of_a_map(tmp_path):
    """What all ranks hold alike is taken once; what they do not is left out and counted."""
    (tmp_path / "dump").mkdir()
    for sample in (0, 1):
        for rank in (0, 1):
            folder = tmp_path / "dump" / f"rank{rank}"
            folder.mkdir(exist_ok=True)
            numpy.save(folder / f"same-{sample}.npy", numpy.arange(6, dtype="f4").reshape(1, 3, 2))
            numpy.save(folder / f"part-{sample}.npy", numpy.full((1, 3, 2), rank, dtype="f4"))
    (tmp_path / "map.toml").write_text(
        '[[file]]\npattern = "rank{rank}/{what}-{sample}.npy"\nsite = "layers.0.{what}:out"\n'
    )
    notes = []
    run = import_dump(
        tmp_path / "dump",
        out=tmp_path / "b",
        map=tmp_path / "map.toml",
        progress=lambda event, done, total=None, detail="": notes.append(detail),
    )
    assert [(r.sample, r.step, r.site) for r in run.records] == [
        (0, 0, "layers.0.same:out"),
        (1, 0, "layers.0.same:out"),
    ]
    assert notes == ["2 tensors are not the same on all ranks (parts, it seems), and were left out"]
    assert run.verify() == []


def test_a_run_that_would_be_empty(tmp_path):
    """Where every tensor is a part, there is nothing to compare."""
    (tmp_path / "dump").mkdir()
    for rank in (0, 1):
        torch.save(torch.full((2, 2), float(rank)), tmp_path / "dump" / f"h-{rank}.pt")
    (tmp_path / "map.toml").write_text('[[file]]\npattern = "h-{rank}.pt"\nsite = "h:out"\n')
    with pytest.raises(DumpError, match="would be empty"):
        import_dump(tmp_path / "dump", out=tmp_path / "b", map=tmp_path / "map.toml")
