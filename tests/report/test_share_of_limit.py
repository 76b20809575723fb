"""The share of a limit: nothing off is 0 %, what is flagged 100 % or more, on every face."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from divergence.cli.main import app
from divergence.comparison.api import compare
from divergence.numerics.floor import share_from_nothing
from divergence.options.commands import BatchOptions
from divergence.recording.api import capture

PROMPTS = [
    "A bridge is built twice: once on paper, where every beam is exact.",
    "Hello there",
    "One",
]
SIZES = (1e-8, 1e-7, 3e-7, 1e-6, 1e-5, 1e-3, 0.3)
"""Of what is added, relative to a tensor: from nothing to gross, through every limit."""
MODULES = ("model.layers.0", "model.layers.1", "model.layers.2.mlp", "model.norm", "lm_head")
_ROW = re.compile(r"^  (\S+) +([<>]?[\d.e+]+)(%|x) +([\w.:]+)(  !)?")


@pytest.fixture(scope="module")
def references(tmp_path_factory, tiny_model):
    """By whether it carries a truth, and whether its prompts are one batch: a run."""
    return {
        (truth, batch): capture(
            tiny_model("llama"),
            out=tmp_path_factory.mktemp("a") / "a",
            prompts=PROMPTS,
            max_new_tokens=3,
            dtype="float32",
            truth=truth,
            batching=BatchOptions(batch=batch),
            probe=False,
            store="full",
        )
        for truth, batch in (("full", False), ("no", False), ("full", True))
    }


def figure(number, unit):
    value = float(number.lstrip("<>"))
    return value / 100 if unit == "%" else value


def faces(report, printed):
    """(face, share, whether it is flagged there, whether anything differs there) of each place."""
    sites = json.loads(report.to_json())["sites"]
    apart = {(s["pass"], s["site"], bool(s["step"])) for s in sites if s["rel_l2"]}
    for site in sites:
        of_all = (site["pass"], site["site"], bool(site["step"])) in apart
        for name, differs in (("limit_usage", of_all), ("usage", bool(site["rel_l2"]))):
            if site[name] is not None:
                yield f"JSON {name}", float(site[name]), site["flagged"], differs
    for line in printed.splitlines():
        if (match := _ROW.match(line)) is not None:
            error, number, unit, _, mark = match.groups()
            yield "screen", figure(number, unit), mark is not None, float(error) > 0
    table = re.search(r"<caption>The largest</caption>.*?</table>", report.html(), re.DOTALL)
    for row in re.findall(r"<tr.*?</tr>", table[0] if table else "", re.DOTALL)[1:]:
        texts = re.findall(r'<td class="figure">([^<]*)</td>', row)
        match = re.fullmatch(r"([<>]?[\d.e+]+)(%|x)", texts[3])
        if match is not None:
            marked = "flagged" in row.split(">")[0] or "begins here" in row
            yield "page", figure(*match.groups()), marked, float(texts[0]) > 0


@pytest.mark.parametrize("seed", range(21))
def test_what_is_flagged_uses_its_whole_limit_and_nothing_off_uses_none(
    references, tmp_path, capsys, seed
):
    """Whatever is added, wherever: of any size, with a truth or without one."""
    rng = random.Random(seed)
    size, name, kind = SIZES[seed % len(SIZES)], rng.choice(MODULES), rng.choice(("noise", "gain"))
    a = references[rng.choice(list(references))]
    first, noise = rng.random() < 0.3, torch.Generator().manual_seed(seed)

    def change(module, args, out):
        tensor = out[0] if isinstance(out, tuple) else out
        more = torch.randn(tensor.shape, generator=noise) if kind == "noise" else 1.0
        changed = tensor * (1 + size * more)
        if first:  # one token alone
            changed = torch.cat((changed[:, :1], tensor[:, 1:]), 1)
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    def prepare(model):
        model.get_submodule(name).register_forward_hook(change)

    b = capture(like=a, out=tmp_path / "b", prepare=prepare, probe=False)
    capsys.readouterr()
    app(["compare", str(a.path), str(b.path), "-v"], standalone_mode=False)
    printed = capsys.readouterr().out
    app(["compare", str(a.path), str(b.path)], standalone_mode=False)
    printed += capsys.readouterr().out
    seen = set()
    for face, share, flagged, differs in faces(compare(a, b), printed):
        seen.add(face.partition(" ")[0])
        assert share >= 0.995 or not flagged, (face, share)
        assert share == 0 or differs, (face, share)
    assert seen >= ({"JSON", "screen"} if "IDENTICAL" not in printed else {"JSON"})


def test_equal_runs_use_nothing_of_any_limit(references, tmp_path):
    """Also where both are as far from the truth as rounding makes each."""
    for number, a in enumerate(references.values()):
        report = compare(a, capture(like=a, out=tmp_path / str(number), probe=False))
        assert report.verdict.kind == "identical"
        assert {site.limit_usage or 0.0 for site in report.sites} == {0.0}
        assert {site.usage or 0.0 for site in report.sites} == {0.0}


def test_the_share_of_a_ratio_goes_from_nothing_to_its_limit():
    """It grows with the ratio without a jump, and beyond the limit it is how many times that."""
    shares = [share_from_nothing(ratio, 4.0) for ratio in (0.2, 1.0, 1.5, 2.0, 3.9, 4.0, 8.0)]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0] and shares[3] == 0.5 and shares[-2:] == [1.0, 2.0]
