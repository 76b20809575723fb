"""capture, inspect and env on the command line."""

import importlib
import json
from pathlib import Path

import msgspec
import pytest

from divergence.numerics.summary import Summary
from divergence.recording import machine as environment
from divergence.run import reader
from divergence.run.manifest import Manifest, Plan, SampleTokens, Sizes, Switch, Tokens
from divergence.run.record import Place, Record
from tests import by_hand


def make_manifest(**changes) -> Manifest:
    values = {
        "id": "0123",
        "complete": True,
        "model": {
            "source": "tiny/[llama]",
            "model_class": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "num_parameters": 1234,
        },
        "tokens": Tokens(
            samples=[SampleTokens(text="Hi [you]", prompt_ids=[1, 2], generated_ids=[3, 4])],
            groups=[[0]],
            texts={"3": " a", "4": "\n"},
        ),
        "settings": {
            "max_new_tokens": 2,
            "switches": [
                Switch(name="tf32", asked="off", found="on", status="refused", note="fixed here")
            ],
        },
        "environment": {
            "label": "box",
            "device_name": "CPU",
            "cpu": "CPU",
            "cpu_capability": "AVX2",
            "num_threads": 2,
            "versions": {"torch": "2.6"},
            "variables": {"OMP_NUM_THREADS": "1"},
        },
        "sizes": Sizes(num_records=2, num_shards=1, stored_bytes=2048, seen_bytes=4096),
    }
    return by_hand.manifest(**values | changes)


def make_record(site: str, step: int = 0, **changes) -> Record:
    values = {
        "pass_": "free",
        "sample": 0,
        "step": step,
        "site": site,
        "order": 0,
        "shape": (1, 2, 4),
        "dtype": "bfloat16",
        "place": Place(shard="r00000-000000.safetensors", key="0"),
        "xxh3": "00",
        "summary": Summary(min=-1.0, max=2.0, mean=0.5, rms=1.0, absmax=2.0, num_nan=1),
    }
    return Record(**{**values, **changes})


class FakeRun:
    """A Run without a directory."""

    problems: tuple[str, ...] = ()

    def __init__(self, path="a", manifest=None):
        self.path = Path(path)
        self.manifest = manifest or make_manifest()
        self.records = [make_record("model.layers.0:out", step) for step in (0, 1)]
        self.records.append(make_record("lm_head:out", shape=()))

    def verify(self, progress=None):
        return list(self.problems)


@pytest.fixture
def capturing(replace_api, monkeypatch):
    """Replaces capture() and plan_capture(); returns their calls."""
    calls = []

    def capture(model=None, **options):
        calls.append((model, options))
        return FakeRun(options["out"])

    def plan_capture(model=None, **options):
        calls.append((model, options))
        row = {
            "site": "model.layers.0:out",
            "role": "block",
            "shape": (1, 2, 4),
            "dtype": "bfloat16",
            "bytes_per_step": 16,
            "num_steps": 3,
            "bytes": 48,
        }
        plan = {
            "rows": [row],
            "num_sites": 1,
            "num_steps": 3,
            "total_bytes": 48,
            "notes": ["n"],
            "parts": {},
        }
        return msgspec.defstruct("DryRun", list(plan))(**plan)

    importlib.import_module("divergence.recording.dry_run")  # it takes more of the API than that
    replace_api("recording", make_run=capture)
    monkeypatch.setattr("divergence.recording.dry_run.plan_capture", plan_capture)
    return calls


def given(calls) -> dict:
    """The options of the last call that were set."""
    options = dict(calls[-1][1])
    for name in ("progress", "command"):
        options.pop(name)
    return options


def test_what_is_not_given_is_left_to_the_api(invoke, capturing):
    """The function's own defaults are the only ones."""
    assert invoke("capture", "m", "-o", "a")[0] == 0
    assert capturing[-1][0] == "m"
    assert given(capturing) == {"out": "a", "like": None}
    assert capturing[-1][1]["command"] == "divergence capture m -o a"


def test_every_option_reaches_the_api(invoke, capturing):
    """Each option is the parameter of the same name."""
    code, _, err = invoke(
        *("capture", "m", "-o", "a", "--task", "encoder", "--revision", "r", "--dtype", "float16"),
        *("--device", "cpu", "--device-map", "auto", "--attn-implementation", "sdpa"),
        *("--trust-remote-code", "--prompt", "x [y]", "--prompt", "z", "--prompts", "p.txt"),
        *("--chat", "--batch", "--max-new-tokens", "0", "--sites", "attention", "--sites", "b:out"),
        *("--steps", "0-3", "--positions", "-1", "--no-deterministic", "--seed", "3"),
        *("--repeat", "2", "--plant", "a:out=nan", "--label", "box", "--force"),
    )
    assert code == 0, err
    assert given(capturing) == {
        "out": "a",
        "like": None,
        "task": "encoder",
        "revision": "r",
        "dtype": "float16",
        "device": "cpu",
        "device_map": "auto",
        "attn_implementation": "sdpa",
        "trust_remote_code": True,
        "prompts": ["x [y]", "z"],
        "prompts_file": Path("p.txt"),
        "chat": True,
        "batch": True,
        "max_new_tokens": 0,
        "sites": ["attention", "b:out"],
        "steps": "0-3",
        "positions": "-1",
        "deterministic": False,
        "seed": 3,
        "repeat": 2,
        "plants": ["a:out=nan"],
        "label": "box",
        "force": True,
    }


@pytest.mark.slow
def test_like_takes_only_the_machine_from_settings(invoke, capturing, monkeypatch):
    """A setting must not turn a repeated run into another run."""
    monkeypatch.setenv("DIVERGENCE_CAPTURE_DTYPE", "float16")
    monkeypatch.setenv("DIVERGENCE_CAPTURE_DEVICE", "cpu")
    assert invoke("capture", "m", "-o", "a")[0] == 0
    assert given(capturing)["dtype"] == "float16"
    assert given(capturing)["device"] == "cpu"
    assert invoke("capture", "--like", "a", "-o", "b", "--no-anchor", "--model", "here")[0] == 0
    assert capturing[-1][0] == "here"
    assert given(capturing) == {"out": "b", "like": "a", "device": "cpu", "anchor": False}


@pytest.mark.parametrize(
    "args",
    [
        ["-o", "a"],
        ["m"],
        ["m", "--like", "a", "-o", "b"],
        ["m", "--model", "n", "-o", "b"],
        ["m", "--no-anchor", "-o", "b"],
        ["m", "-o", "a", "--max-new-tokens", "-1"],
        ["m", "-o", "a", "--repeat", "0"],
        ["m", "-o", "a", "--task", "diffusion"],
    ],
)
def test_contradictions_are_wrong_usage(invoke, capturing, args):
    """What cannot be meant is refused before anything is loaded."""
    code, out, err = invoke("capture", *args)
    assert (code, out) == (2, "")
    assert err
    assert capturing == []


def test_capture_says_what_it_made_and_what_comes_next(invoke, capturing):
    """The command for the other machine can be copied from the last line."""
    _, out, _ = invoke("capture", "m", "-o", "a")
    lines = out.splitlines()
    assert lines[0] == "captured a: 3 records, 2.0 KiB in 1 shard (4.0 KiB with duplicates)"
    assert "tiny/[llama]" in out
    assert "'Hi [you]' -> ' a\\n'" in out
    assert "refused   tf32: asked off, found on; fixed here" in out
    assert lines[-1].startswith("  divergence capture --like a -o OTHER")
    _, out, _ = invoke("capture", "--like", "a", "-o", "b c")
    assert out.splitlines()[-1] == "  divergence compare a 'b c'"
    assert invoke("capture", "m", "-o", "a", "-q")[1] == "a\n"
    answer = json.loads(invoke("capture", "m", "-o", "a", "--json")[1])
    assert (answer["path"], answer["manifest"]["id"]) == ("a", "0123")


def test_dry_run_lists_and_needs_no_directory(invoke, capturing):
    """--dry-run asks the plan and not the capture."""
    code, out, err = invoke("capture", "m", "--dry-run")
    assert code == 0, err
    assert out.splitlines()[0] == "DRY RUN: 1 site, 3 steps, at most 48 B; nothing was written"
    assert "1x2x4" in out
    answer = json.loads(invoke("capture", "m", "--dry-run", "--json")[1])
    assert answer["dry_run"]["rows"][0]["bytes"] == 48


# --- inspect -----------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch):
    """Makes Run.open return a FakeRun."""
    run = FakeRun()
    monkeypatch.setattr(reader.Run, "open", classmethod(lambda cls, path: run))
    return run


def test_inspect_tells_what_ran_and_what_was_recorded(invoke, opened):
    """State, model, machine, prompts and sites."""
    code, out, _ = invoke("inspect", "a", "-v")
    assert code == 0
    assert out.startswith("complete: a, 3 records")
    for text in ("tiny/[llama]", "OMP_NUM_THREADS=1", "'Hi [you]'", "model.layers.0:out", "1x2x4"):
        assert text in out
    assert "2 free, 2 nan or inf" in out


def test_inspect_marks_incomplete_and_planted_runs(invoke, opened):
    """Nobody takes a torn or a planted run for a healthy one."""
    opened.manifest = make_manifest(
        complete=False,
        stopped_by="SIGTERM",
        plan=Plan(passes=["free"], sites=[], plants=["a:out=nan"]),
    )
    _, out, _ = invoke("inspect", "a")
    assert out.startswith("INCOMPLETE (stopped by SIGTERM): a")
    assert "PLANTED FAULT: a:out=nan" in out


def test_inspect_a_site(invoke, opened):
    """--site takes a site or a pattern, and knows the neighbours of a misspelt one."""
    _, out, _ = invoke("inspect", "a", "--site", "model.layers.0:out")
    assert out.splitlines()[0] == "a: 2 records of 1 site"
    assert "\nmodel.layers.0:out  bfloat16, 2 records\n" in out
    assert "1/0/0" in out
    assert "lm_head:out" in invoke("inspect", "a", "--site", "lm_*")[1]
    code, _, err = invoke("inspect", "a", "--site", "model.layer.0:out")
    assert code == 2
    assert "did you mean model.layers.0:out?" in err


def test_inspect_a_site_of_several_ranks(invoke, opened):
    """Whose tensor each line is; one process needs no such column."""
    assert "rank" not in invoke("inspect", "a", "--site", "model.layers.0:out")[1]
    opened.records = [
        msgspec.structs.replace(record, rank=rank) for record in opened.records for rank in (0, 1)
    ]
    _, out, _ = invoke("inspect", "a", "--site", "model.layers.0:out")
    assert [row.split()[:2] for row in out.splitlines()[3:6]] == [
        ["rank", "pass"],
        ["0", "free"],
        ["1", "free"],
    ]


def test_inspect_verify(invoke, opened):
    """A damaged run is named and exits 2, in JSON too."""
    assert "verified    every tensor" in invoke("inspect", "a", "--verify")[1]
    opened.problems = ("shard 0: wrong checksum",)
    code, out, _ = invoke("inspect", "a", "--verify")
    assert code == 2
    assert out.startswith("DAMAGED: ") and "\nproblem     shard 0: wrong checksum" in out
    code, out, _ = invoke("inspect", "a", "--verify", "--json")
    assert code == 2
    assert json.loads(out)["problems"] == ["shard 0: wrong checksum"]


def test_inspect_json(invoke, opened):
    """--json is the manifest and the records."""
    answer = json.loads(invoke("inspect", "a", "--json")[1])
    assert answer["manifest"]["model"]["source"] == "tiny/[llama]"
    assert [record["site"] for record in answer["records"]][-1] == "lm_head:out"


def test_inspect_of_no_run_is_wrong_usage(invoke, tmp_path):
    """The real reader's error comes through with its code."""
    code, out, err = invoke("inspect", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert "does not exist" in err


def test_env(invoke, monkeypatch):
    """The machine, as text and as JSON."""
    monkeypatch.setattr(
        environment, "collect_environment", lambda device="auto": make_manifest().environment
    )
    code, out, _ = invoke("env")
    assert code == 0
    assert out.startswith("machine: box\ndevice      cpu: CPU\n")
    answer = json.loads(invoke("env", "--json")[1])
    assert answer["environment"]["num_threads"] == 2
