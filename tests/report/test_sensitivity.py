"""What `sensitivity` prints: snapshotted, from a hand-made answer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from divergence.experiments.result import Confirmation, FaultSize, Sensitivity
from divergence.layout import share
from divergence.report.experiments import sensitivity_document
from divergence.report.text import document_lines, headline_lines

_spec = importlib.util.spec_from_file_location(
    "terminal_tests", Path(__file__).with_name("test_terminal.py")
)
terminal = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(terminal)

BLOCKS = ["model.layers.0", "model.layers.6", "model.layers.11"]


def make_sizes(fault: str, sizes, deep=(None, None, None), **changes):
    return [
        FaultSize(
            block=block,
            fault=fault,
            tried=1.0,
            **{
                "size": size,
                "by": f"{block}:out: why",
                "escalated_size": other,
                "escalated_by": other and f"{block}:out: why in float32",
            }
            | changes,
        )
        for block, size, other in zip(BLOCKS, sizes, deep, strict=True)
    ]


def make_sensitivity(reports, **changes) -> Sensitivity:
    values = {
        "tool_version": "0",
        "reference": reports.make_run("a"),
        "candidate": reports.make_run("b"),
        "made_here": False,
        "truth": "a-truth",
        "num_floor_runs": 0,
        "dtype": "bfloat16",
        "escalated": True,
        "verdict": reports.make_verdict("within_floor"),
        "num_blocks": 12,
        "num_prompt_tokens": 41,
        "num_trials": 96,
        "blocks": BLOCKS,
        "units": {"scale": "the block's output", "update-scale": "what the block adds"},
        "phrases": {
            "scale": "a scale error of {size}",
            "update-scale": "a scale error of {size} in what a block adds",
        },
        "sizes": [
            *make_sizes("scale", (0.0022, 0.0031, 0.0041), (1.2e-6, 1.1e-6, 2e-6)),
            *make_sizes("update-scale", (0.02, None, 0.031), (3e-6, 3e-6, None)),
        ],
        "notes": ["a note"],
        "next": ["divergence truth a -o a-truth", "divergence sensitivity a"],
    }
    return Sensitivity(**(values | changes))


def test_snapshot(reports):
    """A sentence a fault, the set-up, a table a pass, the units, and the way to see more."""
    result = make_sensitivity(
        reports,
        confirmations=[
            Confirmation(
                block=BLOCKS[1],
                fault="scale",
                plant=f"{BLOCKS[1]}:out=scale:1.00403",
                size=0.00403,
                expected=True,
                seen=True,
                verdict="localized",
                summary="",
            )
        ],
    )
    text = terminal.text_of(document_lines(sensitivity_document(result), verbose=True))
    terminal.assert_snapshot(text, "sensitivity")


def test_one_sentence_a_fault(reports):
    """The size that is seen in any block is the worst one's; the best is named beside it."""
    result = make_sensitivity(
        reports,
        num_blocks=3,
        escalated=False,
        sizes=make_sizes("scale", (0.0022, 0.003, 0.0041)),
        phrases={"scale": "a scale error of {size}"},
    )
    assert terminal.text_of(headline_lines(sensitivity_document(result).headline)) == (
        "in bfloat16 you would see a scale error of 0.41% in any block (worst: model.layers.11; "
        "best 0.22% at\n  model.layers.0)\n"
    )


def test_what_cannot_be_planted_is_said(reports):
    """A reason instead of a number."""
    result = make_sensitivity(
        reports,
        sizes=make_sizes("scale", (None,) * 3, reason="no recorded input", by=None),
        phrases={"scale": "a scale error of {size}"},
        escalated=False,
    )
    assert "scale: no recorded input" in terminal.text_of(
        headline_lines(sensitivity_document(result).headline)
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "100%"),
        (0.41, "41%"),
        (0.0999, "10%"),
        (0.0041, "0.41%"),
        (0.00012, "0.012%"),
        (9.9e-5, "9.9e-05"),
        (1.2e-6, "1.2e-06"),
        (100.0, "10000%"),
        (None, "-"),
    ],
)
def test_share(value, text):
    """Per cent down to a hundredth of one, then powers of ten."""
    assert share(value) == text
