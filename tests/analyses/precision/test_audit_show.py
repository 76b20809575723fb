"""The precision section: marks, both sides, what is hidden in a kernel, and every place."""

import msgspec
import pytest

from divergence.comparison.result import AuditedPlace, AuditResult, AuditRow

PLACE = AuditedPlace(
    part="softmax",
    module="model.layers.1.self_attn",
    site="model.layers.1.self_attn/aten._softmax",
    operators=["model.layers.1.self_attn/aten._softmax"],
    source="modeling_llama.py:197 in eager_attention_forward",
    operands=["bfloat16"],
    result="bfloat16",
    computed="bfloat16",
    accumulates=True,
    expected=["float32"],
    expected_by="attention of modeling_llama.py",
    own=True,
    below=True,
    num_calls=2,
)


def audit(**changes) -> AuditResult:
    row = {
        "part": "softmax",
        "reference": ["float32"],
        "candidate": ["bfloat16"],
        "expected": ["float32"],
        "expected_by": "attention of modeling_llama.py",
        "own": True,
        "below": "candidate",
        "differs": True,
        "num_places": 2,
    }
    return AuditResult(rows=[AuditRow(**(row | changes))], reference=[], candidate=[PLACE])


@pytest.fixture
def texts(reports, lines_of):
    """``texts(audit, *options)``: the lines of its section, as `compare` prints it."""

    def lines(audit, *options) -> list[str]:
        printed = lines_of(reports.make_report(audit=audit), *(options or ["-v"]))
        begin = [number for number, line in enumerate(printed) if line.startswith("precision")]
        return printed[begin[0] :] if begin else []

    return lines


def test_one_line_per_part(texts):
    """The mark, the part, both sides, what was expected and by whom."""
    lines = texts(audit())
    assert lines[1] == "    part              A                  B                  expected"
    assert lines[2] == (
        "  ! softmax           float32            bfloat16           "
        "float32 (attention of modeling_llama.py)"
    )
    assert lines[3].startswith("    as stored: ")
    assert all(len(line) <= 100 for line in lines[:3])


def test_marks(texts):
    """``!`` where the sides differ or the run's own dtype is not met, ``?`` below practice."""
    below = {"differs": False, "below": "both"}
    assert texts(audit(**below))[2].startswith("  ! ")
    asked = texts(audit(**below, own=False))
    assert asked[2].startswith("  ? ")
    assert any(line.startswith("    ?: below what is usual") for line in asked)
    assert texts(audit(differs=False, below=None))[2].startswith("  softmax")  # no marks at all


def test_a_kernel_is_named_below_the_table(texts):
    """The cell stays short, and nothing is claimed of its inside."""
    found = audit(candidate=["inside aten._scaled_dot_product_flash_attention_for_cpu"])
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu"
    place = AuditedPlace(
        part="softmax",
        module="m",
        site="m/x",
        operators=["m/x"],
        operands=["bfloat16"],
        result="bfloat16",
        computed=None,
        kernel=kernel,
    )
    found = msgspec.structs.replace(found, candidate=[place])
    lines = texts(found)
    assert "in one kernel" in lines[2]
    assert lines[3].startswith(f"    one kernel: {kernel}; what it does inside is not")


def test_every_place_on_request(texts):
    """Its site, dtype, what went in and came out, how often, and the source line."""
    (line,) = [text for text in texts(audit(), "--all") if "aten._softmax" in text]
    assert line == (
        "    ! B           model.layers.1.self_attn/aten._softmax: bfloat16; bfloat16 → bfloat16; "
        "2 calls; modeling_llama.py:197 in eager_attention_forward"
    )


def test_a_side_that_was_not_audited_is_said_so(texts):
    """It is not the same as having no such part."""
    assert "not audited" in texts(audit(candidate=None))[2]
    assert "bfloat16           -  " in texts(audit(reference=["bfloat16"], candidate=[]))[2]


def test_nothing_without_operators(texts):
    """No section at all."""
    assert texts(None) == []
    assert texts(AuditResult()) == []
