"""`divergence import`: its words, its exit codes, and what it leaves on disk."""

import json
from pathlib import Path

import pytest

from divergence import Run, import_dump
from divergence.cli.main import app
from divergence.errors import DumpError, UsageError
from divergence.run.writer import RunWriter
from tests.domains.importing.writers import write_npy, write_sglang


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(arg) for arg in args], prog_name="divergence")
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


def test_each_format_has_a_layout_and_a_row_of_the_page(tmp_path):
    """Each that an unknown name's error lists is asked, and docs/importing.md says what is read."""
    page = (Path(__file__).parents[3] / "docs" / "importing.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "a.txt").write_text("a")
    with pytest.raises(UsageError) as unknown:
        import_dump(tmp_path / "dump", out=tmp_path / "a", layout="?")
    names = unknown.value.hint.partition("one of ")[2].split(", ")
    assert len(names) > 15
    for name in names:
        assert any(f"`{name}`" in row for row in rows), name
        with pytest.raises(DumpError, match="this is no dump of"):
            import_dump(tmp_path / "dump", out=tmp_path / "a", layout=name)


def test_what_ctrl_c_leaves_is_named(tmp_path, call, monkeypatch):
    """The run is there, as far as it came."""

    def stop(*_, **more):
        raise KeyboardInterrupt

    (tmp_path / "r.jsonl").write_text('{"completion_ids": [1], "logprobs": [-1.0]}')
    monkeypatch.setattr(RunWriter, "put", stop)
    code, _, err = call("import", "r.jsonl", "-o", "a")
    assert (code, err) == (130, "interrupted; what was recorded so far is in a\n")
    assert Run.open("a").manifest.stopped_by == "interrupted"


def test_import_and_compare(captured, tmp_path, call):
    """An imported dump is compared with the run it is like, and verified."""
    write_sglang(captured, tmp_path / "dump")
    code, out, err = call("import", "dump", "-o", "b", "--like", captured.path)
    assert code == 0, err
    assert out.startswith("imported b: ")
    assert "of 31 sites are none of RUN's" in err or "sites are none of RUN's" in err
    code, out, _ = call("compare", captured.path, "b")
    assert code == 0
    assert out.startswith("IDENTICAL")
    assert "unknown" in out
    code, out, _ = call("inspect", "b", "--verify")
    assert code == 0, out


def test_json(captured, tmp_path, call):
    """--json prints the manifest of what was imported."""
    names = write_npy(captured, tmp_path / "dump")
    code, out, _ = call("import", "dump", "-o", "b", "--map", names, "--json", "--label", "x")
    assert code == 0
    assert json.loads(out)["manifest"]["environment"]["label"] == "x"


def test_bad_input_is_exit_2(captured, tmp_path, call):
    """One error with its place, and no run behind it."""
    names = write_npy(captured, tmp_path / "dump")
    (tmp_path / "dump" / "layer_0_step1.npy").write_bytes(b"")
    write_sglang(captured, tmp_path / "sglang")
    for arguments, words in (
        (["dump"], "there is no directory to write to"),
        (["absent", "-o", "b"], "no such file or folder"),
        (["dump", "-o", "b"], "needs a map"),
        (["dump", "-o", "b", "--format", "sglang"], "no dump of SGLang"),
        (["dump", "-o", "b", "--map", names], "half written"),
        (["dump", "-o", "dump/b", "--map", names], "lies in the dump"),
        (["sglang", "-o", "b", "--map", names], "takes no map"),
    ):
        code, _, err = call("import", *arguments)
        assert code == 2, err
        assert words in " ".join(err.split()), err
    assert not (tmp_path / "b").exists()


def test_a_gate_does_not_pass_what_is_unknown(captured, tmp_path, call):
    """check needs a policy that allows it."""
    write_sglang(captured, tmp_path / "dump")
    assert call("import", "dump", "-o", "b", "--like", captured.path)[0] == 0
    code, out, _ = call("check", captured.path, "b")
    assert code == 1
    assert "unknown: code, weights" in " ".join(out.split())
