"""docs/extending.md: the examples are built as they stand there, and work."""

import importlib.metadata
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import divergence
from divergence import BatchOptions, capture, compare, domain
from divergence.cli.main import app
from divergence.errors import DumpError
from divergence.layout import Line
from divergence.recording import plant
from divergence.report.summary import report_lines

DOCS = Path(__file__).parents[1] / "docs"
SAID = "repeated tokens' norms change most, by "


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """A reference, a candidate that is off at one repeated token, and a healthy one."""
    folder = tmp_path_factory.mktemp("runs")
    how = {"prompts": ["Snow fell, snow fell"], "max_new_tokens": 1, "probe": False}
    a = capture(llama, out=folder / "a", **how)
    ids = a.manifest.tokens.samples[0].prompt_ids
    last = max(place for place, token in enumerate(ids) if token in ids[:place])

    def smaller(tensor, forward):
        return torch.cat(
            [tensor[:, :last], 0.5 * tensor[:, last : last + 1], tensor[:, last + 1 :]], 1
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(plant.FAULTS, "token", ("token", lambda: smaller))
        b = capture(like=a, out=folder / "b", plants=["model.layers.1:out=token"], probe=False)
    return a, b, capture(like=a, out=folder / "c", probe=False)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The package of the page, installed."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"^`(token_norms/\S+)`:\n\n```python\n(.*?)^```", text, re.M | re.S)
    for name, code in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    group, point = re.findall(
        r'^\[project.entry-points."(.+)"\]\ntoken_norms = "(.+)"$', text, re.M
    )[0]
    points = [importlib.metadata.EntryPoint("token_norms", point, group)]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [point for point in points if point.group == group],
    )
    domain.domains.cache_clear()
    yield dict(files)
    domain.domains.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "token_norms"]:
        del sys.modules[name]


def test_the_example_of_the_page_asks_its_question(example, runs):
    """Four files: evidence and JSON have what it found, healthy runs nothing."""
    assert list(example) == [
        f"token_norms/{name}.py" for name in ("__init__", "find", "sentences", "command")
    ]
    a, b, same = runs
    report = compare(a, b)
    (said,) = [item.text for item in report.verdict.evidence if item.text.startswith(SAID)]
    assert any(f.claim == "stands_out" and f.evidence[0].text == said for f in report.findings)
    assert said in "\n".join(line.text for line in report_lines(report) if isinstance(line, Line))
    healthy = compare(a, same)
    assert not any("norms" in item.text for item in healthy.verdict.evidence)


def test_a_hint_does_not_change_the_verdict(example, runs, monkeypatch):
    """With and without the domain kind, onset and confidence are the same."""
    a, b, _ = runs
    with_it = compare(a, b).verdict
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    domain.domains.cache_clear()
    without = compare(a, b).verdict
    for name in ("kind", "summary", "onset", "confidence", "side", "checks"):
        assert getattr(with_it, name) == getattr(without, name)


def test_its_command_is_one_of_the_others(example, runs, capsys):
    """Listed where it wants to stand, and run."""

    def output(*words: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words], prog_name="divergence")
        assert ended.value.code == code
        return capsys.readouterr().out

    a, b, same = runs
    listed = output("--help")
    assert listed.index("inspect ") < listed.index("token-norms ") < listed.index("pack ")
    assert output("token-norms", a.path, b.path).startswith(f"DIVERGED: {SAID}")
    healthy = output("token-norms", a.path, same.path, "--exit-code")
    assert healthy == "HEALTHY: no type of token stands out\n"
    (said,) = json.loads(output("token-norms", a.path, b.path, "--json", "--exit-code", code=1))[
        "stands_out"
    ]
    assert said.startswith(SAID)


def test_prompts_that_one_side_batched_are_no_news(example, llama, tmp_path):
    """Healthy runs of several prompts, together and alone: token by token the same."""
    how = {"prompts": ["Snow fell, snow fell", "Snow", "A bridge, a bridge"], "probe": False}
    a = capture(
        llama, out=tmp_path / "a", batching=BatchOptions(batch=True), max_new_tokens=1, **how
    )
    b = capture(
        llama, out=tmp_path / "b", batching=BatchOptions(batch=False), max_new_tokens=1, **how
    )
    assert not any("norms" in item.text for item in compare(a, b).verdict.evidence)


@pytest.mark.parametrize(
    ("text", "fault", "said"),
    [
        ("any(site.role", "any(1 / 0 == site.role", "division by zero"),
        ('role="hints"', 'role="hint"', "role 'hint' is none of"),
        ('"token_norms.most"', '"token_norms.least"', "least"),
        ("least=min", "lest=min", "least"),
    ],
)
def test_one_that_fails_takes_nothing_away(example, runs, tmp_path, text, fault, said):
    """It is left out, with a note that names the package and the reason."""
    for name in example:
        path = tmp_path / name
        path.write_text(path.read_text().replace(text, fault))
    a, b, _ = runs
    report = compare(a, b)
    assert report.verdict.kind == "localized"
    (note,) = [item.text for item in report.remarks if "token_norms" in item.text]
    assert "the package token_norms failed and is left out" in note
    assert said in note


@pytest.mark.whole
def test_the_format_of_the_page_reads_a_dump(runs, tmp_path, monkeypatch):
    """Each tensor stands at the site of the run that was dumped; a broken index is one error."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^## A format that .*?^```python\n(.*?)^```", text, re.M | re.S)
    # in the place of a format that is there: what FORMATS names is no door
    module = types.ModuleType("divergence.domains.importing.layouts.logits")
    exec(f"{code}\nEDGE = INDEXED", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    dump, index, tensors = tmp_path / "dump", [], {}
    dump.mkdir()
    for record in runs[0].records:
        path, _, port = record.site.partition(":")
        if (record.pass_, port) == ("free", "out") and path.startswith("model.layers."):
            name, tensors[record.site] = f"{len(index)}.npy", runs[0].read(record).float()
            np.save(dump / name, tensors[record.site][0].numpy())
            index.append({"file": name, "module": path, "step": record.step})
    (dump / "index.json").write_text(json.dumps(index))
    made = divergence.import_dump(dump, out=tmp_path / "made", layout="tensorrt-edge", like=runs[0])
    assert {record.site: made.read(record).tolist() for record in made.records} == {
        site: tensor.tolist() for site, tensor in tensors.items()
    }
    (dump / "index.json").write_text(json.dumps([{"file": "0.npy"}]))
    with pytest.raises(DumpError, match="KeyError: 'module'"):
        divergence.import_dump(dump, out=tmp_path / "again", layout="tensorrt-edge", like=runs[0])
