"""Every command on runs that keep no bytes: an answer, or what is lacking; never a fault."""

import json

import pytest

from divergence import RecordOptions, capture
from divergence import truth as make_truth

MODES = ("sketch", "stats", "hash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """For each mode ``a``, and ``b`` with a fault; a truth of the sketched one; one in part."""
    folder = tmp_path_factory.mktemp("reduced")
    model = str(tiny_model("llama", hidden=256))
    plant = ["model.layers.1.mlp:out=scale:1.3"]
    for mode in MODES:
        capture(model, out=folder / f"{mode}-a", store=mode, max_new_tokens=3, probe=False)
        capture(like=folder / f"{mode}-a", out=folder / f"{mode}-b", plants=plant, probe=False)
    make_truth(folder / "sketch-a", out=folder / "truth")
    capture(model, out=folder / "full", max_new_tokens=3, probe=False)
    capture(
        like=folder / "full",
        out=folder / "part-b",
        plants=plant,
        recording=RecordOptions(only_changed=True),
        probe=False,
    )
    capture(
        like=folder / "full",
        out=folder / "part-a",
        recording=RecordOptions(only_changed=True),
        probe=False,
    )
    return folder


def test_a_run_in_part_becomes_no_golden(folder, tmp_path, invoke):
    """What it leaves out would lie in the golden before, which the next one removes."""
    golden = tmp_path / "golden"
    assert invoke("check", golden, folder / "full", "--bless")[0] == 0
    code, out, err = invoke("check", golden, folder / "part-a", "--bless")
    assert (code, out) == (2, "")
    assert "only what differs from run" in err and "without --only-changed" in err
    assert not (tmp_path / "golden.previous").exists()
    assert invoke("check", golden, folder / "part-a")[0] == 0


COMMANDS = {
    "inspect": (("inspect", "A"), 0),
    "inspect a site": (("inspect", "A", "--site", "model.layers.1:out"), 0),
    "inspect --json": (("inspect", "A", "--json"), 0),
    "verify": (("inspect", "B", "--verify"), 0),
    "compare": (("compare", "A", "B", "-v"), 0),
    "compare --json": (("compare", "A", "B", "--json"), 0),
    "compare with a truth": (("compare", "A", "B", "--truth", "TRUTH"), None),
    "compare three": (("compare", "A", "B", "A"), 0),
    "compare one": (("compare", "A"), 2),
    "check": (("check", "A", "B"), 1),
    "a truth": (("truth", "A", "-o", "new"), 0),
    "escalate": (("capture", "--like", "A", "-o", "new", "--escalate", "--no-probe"), 0),
    "whole": (("capture", "--like", "A", "-o", "new", "--whole", "--no-probe"), 0),
    "replay": (("replay", "A", "-o", "new"), 2),
    "repro": (("repro", "A", "--site", "model.layers.1/aten.mm:out", "-o", "new"), 2),
    "localize": (("localize", "A", "B", "-o", "new"), None),
    "sensitivity": (("sensitivity", "A", "--candidate", "B"), 2),
    "explain": (("compare", "A", "B", "--explain-token"), None),
    "pack": (("pack", "A", "-o", "new.tar"), 0),
}


@pytest.mark.parametrize("mode", [*MODES, "part"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_fails(folder, tmp_path, invoke, monkeypatch, mode, name):
    """Exit code 0 with an answer, or 2 with what is lacking."""
    words, wanted = COMMANDS[name]
    monkeypatch.setattr("logging.raiseExceptions", False)
    places = {"A": f"{mode}-a", "B": f"{mode}-b", "TRUTH": "truth"}
    words = [str(folder / places[word]) if word in places else word for word in words]
    words = [str(tmp_path / word) if word.startswith("new") else word for word in words]
    code, out, err = invoke(*words)
    assert "fault in divergence" not in err and "Traceback" not in err
    assert code == wanted if wanted is not None else code in (0, 2), (code, err)
    if code == 2:
        assert "error" in err.lower() and len(err) > 40
    if name.endswith("--json"):
        json.loads(out)


def test_verify_claims_no_more_than_it_read(folder, invoke):
    """Of what is not stored nothing is verified."""
    said = {}
    for name in ("sketch-b", "hash-b", "part-b", "full"):
        code, out, _ = invoke("inspect", str(folder / name), "--verify", "-q")
        assert code == 0
        said[name] = out.splitlines()[-1].removeprefix("verified").strip()
    every = "every tensor has the checksum it was written with"
    assert (said["full"], said["sketch-b"]) == (every, every)
    assert said["hash-b"] == (
        "nothing: no tensor is stored (the run was captured with --store hash)"
    )
    assert said["part-b"].startswith("every stored tensor")
    answer = json.loads(invoke("inspect", str(folder / "hash-b"), "--verify", "--json")[1])
    assert (answer["problems"], answer["num_stored"]) == ([], 0)
    assert " are not stored (what did not change is in run " in said["part-b"]


def test_what_a_sketched_run_passes_on_is_named_with_the_way_out(folder, tmp_path, invoke):
    """--store was not given, but recorded: leaving it out would change nothing."""
    run = str(folder / "sketch-a")
    options = ("--like", run, "-o", str(tmp_path / "new"), "--no-probe")
    assert "give --store full" in invoke("capture", *options, "--whole")[2]
    code, _, err = invoke("capture", *options, "--sites", "ops@model.layers.1", "--force")
    assert code == 2
    assert "with --store full" in err
