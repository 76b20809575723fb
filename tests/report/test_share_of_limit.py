"""The share of a limit: nothing off is 0 %, what is flagged 100 % or more, on every face."""

import itertools
import json
import random
import re
from typing import NamedTuple

import pytest
import torch

from divergence import BatchOptions, capture, compare
from divergence.cli.main import app
from divergence.numerics.floor import share_from_nothing
from divergence.words import limit_share

PROMPTS = [
    "A bridge is built twice: once on paper, where every beam is exact.",
    "Hello there",
    "One",
]
SIZES = (1e-8, 1e-7, 3e-7, 1e-6, 1e-5, 1e-3, 0.3)
"""Of what is added, relative to a tensor: from nothing to gross, through every limit."""
MODULES = ("model.layers.0", "model.layers.1", "model.layers.2.mlp", "model.norm", "lm_head")
_SHARE = r"[\d.e+]+(?:%| ×)"
_ROW = re.compile(rf"^  (?:\S+ +)?(\S+) +({_SHARE}) +([\w.:]+)(  !)?")
_NEAREST = re.compile(rf"\bworst ({_SHARE})(?: of)? its limit")
_PROMPT = re.compile(
    rf"^ [ >](?:([ !]) )? *\d+ +(\S+:\S+) +\w+(?: +\d+)? +\S+ × +({_SHARE})$", re.M
)


@pytest.fixture
def references(shared_run):
    """By whether it carries a truth, and whether its prompts are one batch: a run."""
    options = {"prompts": PROMPTS, "max_new_tokens": 3, "dtype": "float32", "probe": False}
    return {
        (truth, batch): shared_run(
            truth=truth, batching=BatchOptions(batch=batch), store="full", **options
        )
        for truth, batch in (("full", False), ("no", False), ("full", True))
    }


class Shown(NamedTuple):
    """One share as a face shows it."""

    face: str
    text: str
    flagged: bool
    differs: bool
    """Does anything differ there?"""

    @property
    def share(self):
        return float(self.text.rstrip("% ×")) / (100 if self.text.endswith("%") else 1)


def of_json(report):
    sites = json.loads(report.to_json())["sites"]
    apart = {(s["pass"], s["site"], bool(s["step"])) for s in sites if s["rel_l2"]}
    for site in sites:
        of_all = (site["pass"], site["site"], bool(site["step"])) in apart
        for name, differs in (("limit_usage", of_all), ("usage", bool(site["rel_l2"]))):
            if site[name] is not None:
                yield Shown(f"JSON {name}", str(float(site[name])), site["flagged"], differs)


def of_screen(printed):
    """Of a faulty pair the rows beyond a limit, of a healthy one what comes nearest to it."""
    for line in printed.splitlines():
        if (match := _ROW.match(line)) is not None:
            error, text, _, mark = match.groups()
            yield Shown("screen", text, mark is not None, float(error) > 0)
    for text in _NEAREST.findall(" ".join(printed.split())):
        yield Shown("screen", text, False, True)


def of_whole(printed, apart):
    """The prompts of `-v`. ``apart``: the sites where anything differs."""
    for mark, site, text in _PROMPT.findall(printed):
        yield Shown("-v", text, mark == "!", site in apart)


def of_page(page, apart):
    """Each table that has shares, by its caption."""
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        caption = re.search(r"<caption>([^<]*)", table)[1]
        titles, *rows = re.findall(r"<tr.*?(?=<tr|</table)", table, re.DOTALL)
        titles = cells_of(titles)
        for row in rows if "share of limit" in titles else []:
            cells = dict(zip(titles, cells_of(row), strict=True))
            flagged = "flagged" in row.split(">")[0] or "begins here" in row
            error = cells.get("relative L2")
            differs = cells["worst at"] in apart if error is None else error not in ("0", "-")
            if (text := cells["share of limit"]) != "-":
                yield Shown(f"page {caption}", text, flagged, differs)


def cells_of(row):
    cells = re.findall(r"<t[hd]\b.*?(?=<t[hd]\b|$)", row, re.DOTALL)
    return [re.sub(r"<[^>]*>", "", cell).strip() for cell in cells]


@pytest.mark.slow
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
    whole, screen = (printed_of(capsys, a, b, *options) for options in (["-v"], []))
    report = compare(a, b)
    apart = {site.site for site in report.sites if site.rel_l2}
    faces = {
        "JSON": list(of_json(report)),
        "screen": list(of_screen(screen)),
        "-v": list(of_whole(whole, apart)),
        "page": list(of_page(report.html(), apart)),
    }
    for shown in itertools.chain(*faces.values()):
        assert shown.share >= 0.995 or not shown.flagged, shown
        assert shown.share == 0 or shown.differs, shown
    if not any(site.rel_l2 for site in report.sites if site.pass_ != "free"):
        assert not faces["screen"], "what adds up in free runs is held to no limit of a site"
        assert not apart or report.verdict.kind != "identical"
        return
    lacking = [face for face, shown in faces.items() if not shown]
    # a first screen tells the onset's sizes as the reason alone, and of a healthy pair whose paths
    # take more lines not the worst place
    left_out = report.verdict.onset is not None or len(screen.splitlines()) >= 12
    assert lacking == ["screen"] * (left_out and not faces["screen"])
    numbers = {
        limit_share(getattr(site, name))
        for site in report.sites
        for name in ("usage", "limit_usage")
    } | {limit_share(prompt.usage) for site in report.sites for prompt in site.prompts}
    assert {shown.text for face in ("screen", "-v", "page") for shown in faces[face]} <= numbers
    worst, prompts = (
        [shown.text for shown in faces["page"] if word in shown.face]
        for word in ("largest", "Prompts")
    )
    lines = [shown.text for shown in faces["screen"]]
    assert lines == worst[: len(lines)], "the page's first rows are those of the screen"
    assert prompts == [shown.text for shown in faces["-v"]]


def printed_of(capsys, a, b, *options):
    capsys.readouterr()
    app(["compare", str(a.path), str(b.path), *options], standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.slow
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
