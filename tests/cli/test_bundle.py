"""`divergence bundle`: one zip to send, of two runs in a home directory."""

import json
import re
import shutil
import zipfile

import pytest

from divergence import capture


@pytest.fixture(scope="module")
def runs(llama, answer_of, tmp_path_factory):
    """Two runs in somebody's home, and what `localize` leaves beside them."""
    home = tmp_path_factory.mktemp("x") / "home" / "somebody"
    options = {"prompts": ["Snow fell"], "max_new_tokens": 1, "probe": False}
    one = capture(llama, out=home / "one", **options)
    two = capture(llama, out=home / "two", plants=["model.layers.1:out=scale:1.5"], **options)
    (home / "one-two" / "repro").mkdir(parents=True)
    pair = {"reference": one.manifest.id, "candidate": two.manifest.id}
    (home / "one-two" / "pair.json").write_text(json.dumps(pair))
    level = {
        "level": "operator",
        "verdict": "localized",
        "site": "aten.mm#2:out",
        "side": "candidate",
        "why": f"in {home}/one",
    }
    descent = answer_of(
        "localize",
        reference="one",
        candidate="two",
        out=str(home / "one-two"),
        side="candidate",
        levels=[level],
        stopped="no operator is beyond its limit",
    )
    (home / "one-two" / "localize.json").write_text(descent.to_json())
    (home / "one-two" / "repro" / "repro.py").write_text("print('alone')\n")
    (home / "one-two" / "repro" / "report.md").write_text("# `aten.mm`: 1 against 2\n\nmore")
    (home / "one-two" / "repro" / "notes.txt").write_text("somebody else's")
    return home


def test_a_bundle_tells_nothing_of_its_maker(invoke, runs, tmp_path):
    """Both paths lie in a home, which no file of the bundle names."""
    code, out, err = invoke("bundle", runs / "one", runs / "two", "-o", "bug.zip")
    assert (code, err) == (0, "")
    assert "bundled     bug.zip: README.md, report.md, report.json" in out
    with zipfile.ZipFile(tmp_path / "bug.zip") as folder:
        files = {name: folder.read(name) for name in folder.namelist()}
    assert "reproducer/repro.py" in files and "reproducer/notes.txt" not in files
    for name, data in files.items():
        assert b"somebody" not in data and str(tmp_path.parent).encode() not in data, name
    assert json.loads(files["report.json"])["candidate"]["path"] == "B"
    manifests = [json.loads(files[f"manifest-{name}.json"]) for name in "AB"]
    assert manifests[0]["plan"]["plants"] == [] and len(manifests[1]["plan"]["plants"]) == 1
    readme = files["README.md"].decode()
    assert "`python reproducer" not in readme and "python reproducer/repro.py" in readme
    assert "What it shows: `aten.mm: 1 against 2`" in readme
    assert b"## The machines" in files["report.md"]
    answer = files["report.md"].decode().partition("## What localize found")[2]
    assert "LOCALIZED: at operator aten.mm#2:out, by B: no operator is beyond its limit" in answer
    assert re.search("operator +aten.mm#2:out, by B: in A\n", answer)
    assert json.loads(files["localize.json"])["levels"][0]["site"] == "aten.mm#2:out"


@pytest.mark.parametrize(
    "answer", ["[]", "{", '{"levels": [3, {"site": ["x"]}]}', '{"levels": "x", "stopped": {}}']
)
def test_a_strange_answer_of_localize_harms_nothing(invoke, runs, tmp_path, answer):
    """What lies beside the runs may be anybody's."""
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    (folder / "one-two" / "localize.json").write_text(answer)
    assert invoke("bundle", folder / "one", folder / "two", "-o", "bug.zip", "-q")[0] == 0


def test_a_link_is_not_followed(invoke, runs, tmp_path):
    """A reproducer that is a link to something else stays out."""
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    (tmp_path / "secret").write_text("a secret")
    (folder / "one-two" / "repro" / "repro.py").unlink()
    (folder / "one-two" / "repro" / "repro.py").symlink_to(tmp_path / "secret")
    assert invoke("bundle", folder / "one", folder / "two", "-o", "bug.zip", "-q")[0] == 0
    with zipfile.ZipFile(tmp_path / "bug.zip") as made:
        assert "reproducer/repro.py" not in made.namelist()
        assert "Run it alone" not in made.read("README.md").decode()


def test_what_is_there_stays(invoke, runs, tmp_path):
    """A bundle replaces nothing unasked, and is a zip."""
    (tmp_path / "bug.zip").write_text("mine")
    code, _, err = invoke("bundle", runs / "one", runs / "two", "-o", "bug.zip")
    assert code == 2 and "--force" in err
    assert (tmp_path / "bug.zip").read_text() == "mine"
    for out in ([], ["-o", "bug.tar"]):
        code, _, err = invoke("bundle", runs / "one", runs / "two", *out)
        assert code == 2 and "a bundle is a .zip file" in err
