"""record(): runs of any module; what differs is found, what is equal is equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from divergence import Run, capture, compare, record
from divergence.errors import RunExistsError, UsageError


class Tower(nn.Module):
    """Four blocks of two products, as vision and speech models have them."""

    def __init__(self, *, wrong=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(4)
        )
        self.wrong = wrong

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x + block(x) * (1.1 if number == self.wrong else 1.0)
        return x


def _recorded(module, out, *, num=3, **options):
    torch.manual_seed(1)
    with record(module, out=out, **options) as recording:
        for _ in range(num):
            assert recording.step(torch.randn(1, 12, 32)).shape == (1, 12, 32)
        assert recording.num_steps == num
    return Run.open(out)


def test_the_same_module_twice_is_equal(tmp_path):
    a, b = (_recorded(Tower(), tmp_path / name) for name in "ab")
    assert a.manifest.complete and len(a.manifest.tokens.samples) == 3
    assert {record.site for record in a.records} >= {
        ".:in",
        ".:out",
        "blocks.1:out",
        "blocks.1.1:in",
    }
    report = compare(a, b)
    assert report.verdict.kind == "identical"


def test_a_fault_is_found_where_it_is_made(tmp_path):
    a = _recorded(Tower(), tmp_path / "a", label="A")
    b = _recorded(Tower(wrong=2), tmp_path / "b", label="B")
    report = compare(a, b)
    assert report.verdict.kind in ("localized", "systematic", "drift")
    first = next(site for site in report.sites if not site.identical)
    assert first.site.startswith("blocks.3")  # block 2 gets and gives what it should


def test_other_weights_stop_the_comparison(tmp_path):
    other = Tower()
    nn.init.zeros_(other.blocks[0][1].weight)
    runs = _recorded(Tower(), tmp_path / "a"), _recorded(other, tmp_path / "b")
    assert compare(*runs).verdict.kind == "incomparable"


def test_what_cannot_be_recorded_is_refused(tmp_path):
    with (
        pytest.raises(UsageError, match=r"no torch\.nn\.Module"),
        record(print, out=tmp_path / "x"),
    ):
        pass
    with (
        pytest.raises(UsageError, match="no step was made"),
        record(Tower(), out=tmp_path / "y"),
    ):
        pass
    _recorded(Tower(), tmp_path / "z", num=1)
    with pytest.raises(RunExistsError), record(Tower(), out=tmp_path / "z"):
        pass


def test_a_block_that_raises_leaves_a_readable_run(tmp_path):
    with pytest.raises(ZeroDivisionError), record(Tower(), out=tmp_path / "a") as recording:
        recording.step(torch.ones(1, 2, 32))
        raise ZeroDivisionError
    run = Run.open(tmp_path / "a")
    assert not run.manifest.complete and run.records


def test_capture_takes_a_module_and_its_inputs(tmp_path):
    """One step for each input, given as a tensor, as arguments or by name."""
    torch.manual_seed(1)
    x = torch.randn(1, 12, 32)
    runs = [
        capture(Tower(wrong=wrong), inputs=[x, (x,), {"x": x}], out=tmp_path / name)
        for name, wrong in (("a", None), ("b", None), ("c", 1))
    ]
    assert len(runs[0].manifest.tokens.samples) == 3
    assert compare(runs[0], runs[1]).verdict.kind == "identical"
    report = compare(runs[0], runs[2])
    first = next(site for site in report.sites if not site.identical)
    assert first.site.startswith("blocks.2")


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (Tower, {}, "needs inputs"),
        (Tower, {"inputs": torch.zeros(1, 2, 32)}, "needs inputs"),
        (Tower, {"inputs": [torch.zeros(1, 2, 32)], "dtype": "bfloat16"}, "dtype: a module"),
        (Tower, {"inputs": [torch.zeros(1, 2, 32)], "like": "a"}, "like: a module"),
        (lambda: "model", {"inputs": [torch.zeros(1, 2, 32)]}, "the model is str"),
        (object, {}, "the model is object"),
    ],
)
def test_what_a_module_cannot_follow_is_refused(tmp_path, model, options, said):
    with pytest.raises(UsageError, match=said):
        capture(model(), out=tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
