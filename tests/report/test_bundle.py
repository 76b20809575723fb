"""The bundle: what one sends of a comparison, without what tells of people and places."""

import io
import json
import zipfile

import pytest

from divergence import Report
from divergence.facts import Fact
from divergence.report.bundle import Redaction, bundle_files, zipped
from divergence.run.manifest import Environment

HOSTILE = "</pre><script>x</script> | `a` [b](http://c.d) @you #1 \u202e\x1b[31m\n# head"


@pytest.fixture
def redaction():
    return Redaction({"/home/alice/runs/a": "A", "b": "B"}, private=("myhost", "alice", "root"))


def machine(**changes):
    values = {
        "label": "CPU",
        "platform": "Linux x86_64",
        "python": "3.12",
        "device_type": "cpu",
        "device_name": "CPU",
        "cpu": "CPU",
        "cpu_capability": "AVX2",
        "num_threads": 2,
        "versions": {"torch": "2.8"},
    }
    return Environment(**{**values, **changes})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("divergence compare /home/alice/runs/a b --json", "divergence compare A b --json"),
        ("in /home/alice/runs/a/manifest.json", "in A/manifest.json"),
        ("a and ab and b.zip", "a and ab and b.zip"),
        ("--model /data/models/llama -o x", "--model …/llama -o x"),
        ("~/models/llama", "…/llama"),
        ("~/llama", "…/llama"),
        ("at '/Users/bob'", "at '…/'"),
        (r"C:\Users\bob\model", "…/model"),
        ("file:///home/bob/x.py:12", "…/x.py:12"),
        ("model.layers.0/aten.mm:out", "model.layers.0/aten.mm:out"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("a label of myhost, by Alice; root mean square", "a label of …, by …; root mean square"),
        ("1 / 2 and x/y/z", "1 / 2 and x/y/z"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst capture", "HF_TOKEN=… capture"),
        ("MY_TOKEN=abcdefgh pad_token=<|pad|>", "MY_TOKEN=… pad_token=<|pad|>"),
        ("key sk-proj-0123456789abcdef, then", "key …, then"),
        ("https://user:word@example.org/a", "https://…@example.org/a"),
        ("s3://b/k?X-Amz-Signature=00ff00ff&x=1", "s3://b/k?X-Amz-Signature=…&x=1"),
        ("--api-key=verysecret, client_secret: 'hush-hush'", "--api-key=…, client_secret: '…'"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer …"),
        ("eos_token: </s> of the model", "eos_token: </s> of the model"),
        ("at prompt 6, token 3; tokenizer: the same", "at prompt 6, token 3; tokenizer: the same"),
    ],
)
def test_what_tells_is_taken_out(redaction, text, left):
    """Paths, homes, this host and user; sites, addresses and arithmetic stay."""
    assert redaction.text(text) == left


def test_a_redacted_report_is_a_report(redaction, reports):
    """Nothing but texts has changed."""
    report = reports.make_long_report()
    files = bundle_files(report, {}, Redaction({"a": "A", "b": "B"}, private=()))
    made = Report.of(json.loads(files["report.json"]))
    assert isinstance(made, Report)
    assert made.to_json() == report.to_json()


@pytest.mark.slow
def test_the_bundle_holds_both_machines_and_the_first_screen(redaction, reports):
    """Rows that differ first; the reproducer's files by their names."""
    files = bundle_files(
        reports.make_long_report(),
        {"A": machine(), "B": machine(cpu="other")},
        redaction,
        reproducer={"repro.py": b"# /home/al/x.py", "../evil": b"", "inputs.safetensors": b"1"},
    )
    assert set(files) == {
        "README.md",
        "report.md",
        "report.json",
        "report.html",
        "error.svg",
        "reproducer/repro.py",
        "reproducer/inputs.safetensors",
    }
    assert files["reproducer/repro.py"] == "# …/x.py".encode()
    text = files["report.md"].decode()
    assert text.startswith("# DIVERGED\n")
    table = text.partition("## The machines")[2].strip().splitlines()
    assert table[0] == "What differs:"
    assert "| `CPU` | `CPU` | `other` |" in table
    assert "DIVERGED: the error is made in model.layers.30.mlp.down_proj" in text
    assert json.loads(files["report.json"])["reference"]["path"] == "a"


def test_hostile_names_stay_text_and_inside(redaction, reports):
    """No tag, mark or line of a run's own, and the zip's names are fixed."""
    report = reports.make_report(
        reference=reports.make_run("../../" + HOSTILE, model=HOSTILE, label=HOSTILE),
        verdict=reports.make_verdict("localized", summary=HOSTILE, evidence=[Fact(text=HOSTILE)]),
        sites=[reports.make_site(f"{HOSTILE}:out")],
    )
    files = bundle_files(
        report, {"A": machine(label=HOSTILE, versions={HOSTILE: HOSTILE})}, redaction
    )
    text = files["report.md"].decode()
    before, shown, after = text.split("\n```\n")
    assert "<script" in shown and "&#" not in shown and "`" * 3 not in shown
    for obeyed in ("\x1b", "\u202e", "\n# head"):
        assert obeyed not in shown
    text = before + after + files["README.md"].decode()
    for obeyed in ("<script", "](", "@you", " #1", "\x1b", "\u202e", "\n# head", "http://"):
        assert obeyed not in text
    with zipfile.ZipFile(io.BytesIO(zipped(files))) as folder:
        pages = {"report.md", "report.json", "report.html", "error.svg", "README.md"}
        assert set(folder.namelist()) == pages
    svg = files["error.svg"].decode()
    assert "<script" not in svg and "\u202e" not in svg
    assert zipped(files) == zipped(dict(files))
