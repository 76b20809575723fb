"""What two machines' arithmetic explains: only what both verified, and by a stated formula."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from divergence.comparison.arithmetic import expected_w, explain_arithmetic
from divergence.domains.probe.find import find
from divergence.facts import sentence
from divergence.run.manifest import ArithmeticFact, Manifest
from tests import by_hand
from tests.models.trees import balanced, sequential

SHAPE = "linear M=16 K=512 N=64"


def fact(name: str, value: str, **changes) -> ArithmeticFact:
    return ArithmeticFact(**{"name": name, "value": value, "verified": True, **changes})


def order(value: str, partials: float, dtype: str = "float32", **changes) -> ArithmeticFact:
    numbers = {"terms": 512, "partials": partials, "rounded_products": 0}
    numbers |= changes.pop("numbers", {})
    return fact(f"order: {SHAPE} {dtype}", value, digest=value, numbers=numbers, **changes)


def manifest(*facts: ArithmeticFact, source: str = "tiny", dtype: str = "bfloat16") -> Manifest:
    task = "operators" if source == "probe" else "causal-lm"
    model = {"source": source, "task": task, "dtype": dtype, "num_parameters": 0}
    return by_hand.manifest(id=source, complete=True, model=model, arithmetic=list(facts))


def texts(a: Manifest, b: Manifest) -> list[str]:
    return [sentence(item) for item in explain_arithmetic(a, b).evidence]


TF32 = fact(
    f"input bits: {SHAPE} float32", "10 bits (TF32), cut off", numbers={"weight": 10, "input": 10}
)
FULL = fact(
    f"input bits: {SHAPE} float32", "23 bits (float32)", numbers={"weight": 23, "input": 23}
)


def test_lost_input_bits_are_named_with_their_side():
    """The coarser side comes first, whichever it is."""
    (text,) = texts(manifest(FULL), manifest(TF32))
    assert text == (
        f"{SHAPE} float32: B keeps 10 bits (TF32), cut off of its float32 inputs, "
        "A 23 bits (float32)"
    )
    assert texts(manifest(TF32), manifest(FULL))[0].startswith(
        f"{SHAPE} float32: A keeps 10 bits (TF32)"
    )


def test_orders_are_explained_with_their_expected_w():
    """W = √(131327 / 65664): twice the mean square is 1.41 times the error."""
    found = explain_arithmetic(
        manifest(order("fused blocks", 65664)), manifest(order("sequential 512", 131327))
    )
    (item,) = found.evidence
    assert sentence(item) == (
        f"{SHAPE} float32: A adds fused blocks, B sequential 512: B's error should be 1.41 × A's"
    )
    assert item.values["expected_w"] == pytest.approx((131327 / 65664) ** 0.5)


def test_measured_w_stands_in_the_explanation():
    """Beside the expected one where there is one."""
    a = manifest(order("pairwise", 5000, numbers={"error": 1e-7}))
    b = manifest(order("sequential 512", 131327, numbers={"error": 4e-7}))
    (item,) = explain_arithmetic(a, b).evidence
    assert sentence(item).endswith("B's error should be 5.12 × A's, measured 4.00 × A's")


def test_w_by_hand():
    """Rounded products count as n more roundings; a narrow store hides all; for additions that
    cut off or are fused there is no formula."""
    one, two = order("a", 1000), order("b", 1488, numbers={"rounded_products": 1})
    assert expected_w(one, two) == pytest.approx(2**0.5)  # (1488 + 512) / 1000
    cut = fact("accumulator: x", "", numbers={"bits": 24, "cut": 1})
    near = fact("accumulator: x", "", numbers={"bits": 24, "cut": 0})
    assert expected_w(one, one, accumulators=(near, cut)) is None
    assert expected_w(one, order("c", 1000, numbers={"widest": 9})) is None
    doubted = msgspec.structs.replace(cut, verified=False)
    assert expected_w(one, one, accumulators=(near, doubted)) == 1.0
    narrow = order("a", 1000, "bfloat16"), order("b", 100_000, "bfloat16")
    # 512 stores at 2^-8 beside 10^5 roundings at 2^-24: 512 · 2^16 is 335 times 10^5
    assert expected_w(*narrow) == pytest.approx(1.0, abs=0.01)
    short = fact("accumulator: x", "", numbers={"bits": 8, "cut": 0})
    assert expected_w(*narrow, accumulators=(near, short)) > 10


def test_expected_w_is_what_random_sums_show():
    """Sequential against pairwise sums of 256 float32 terms, 4,000 sums: within a tenth."""
    terms, source = 256, np.random.default_rng(4)
    values = source.standard_normal((terms, 4000)).astype(np.float32)
    exact = values.astype(np.float64).sum(axis=0)
    rms = {}
    for tree in (sequential(terms), balanced(terms)):
        made = list(values)
        for left, right in tree.nodes:
            made.append(made[left] + made[right])
        rms[tree] = float(np.sqrt(np.mean((made[-1] - exact) ** 2)))
    facts = [
        order("x", tree.partials, numbers={"terms": terms})
        for tree in (balanced(terms), sequential(terms))
    ]
    measured = rms[sequential(terms)] / rms[balanced(terms)]
    assert expected_w(*facts) == pytest.approx(
        measured, rel=0.1
    )  # c is no constant: it varies by binade


def test_what_is_not_verified_is_counted_and_never_explained_with():
    """On either side."""
    doubted = order("sequential 512", 131327, verified=False, evidence="not replayed")
    for pair in ((doubted, order("pairwise", 5000)), (order("pairwise", 5000), doubted)):
        found = explain_arithmetic(manifest(pair[0], FULL), manifest(pair[1], FULL))
        (item,) = found.evidence
        assert sentence(item) == (
            "the probed arithmetic is the same on both sides (1 fact; 1 more not verified)"
        )
        assert found.lines[0].status == "same"


def test_equal_machines_say_so_in_one_line():
    """Every fact equal."""
    side = manifest(FULL, order("pairwise", 5000))
    found = explain_arithmetic(side, side)
    assert [sentence(item) for item in found.evidence] == [
        "the probed arithmetic is the same on both sides (2 facts)"
    ]
    assert (found.lines[0].status, found.num_differ) == ("same", 0)


def test_equal_words_of_other_trees_differ():
    """The digest decides."""
    one, two = (
        order("pairwise 16", 64),
        msgspec.structs.replace(order("pairwise 16", 64), digest="x"),
    )
    assert texts(manifest(one), manifest(two)) == [
        f"{SHAPE} float32: both add as pairwise 16, but other terms stand together: B's error "
        "should be 1.00 × A's"
    ]


def test_formats_that_the_runs_do_not_use_are_left_out():
    """A bfloat16 model does not round in float16; probes compare everything."""
    one, two = (order(value, 1000, "float16") for value in ("a", "b"))
    assert explain_arithmetic(manifest(one, FULL), manifest(two, FULL)).num_differ == 0
    (line,) = explain_arithmetic(manifest(one, FULL), manifest(two, FULL)).lines
    assert (line.reference, line.candidate) == ("1 of 2 facts", "1 fact")  # inspect says 2
    probes = manifest(one, source="probe"), manifest(two, source="probe")
    assert explain_arithmetic(*probes).num_differ == 1


def test_runs_without_facts():
    """Neither: nothing at all. One: said, and nothing claimed."""
    assert explain_arithmetic(manifest(), manifest()).lines == ()
    found = explain_arithmetic(manifest(FULL), manifest())
    assert found.evidence == ()
    assert [found.lines[0].reference, found.lines[0].candidate] == ["1 fact", "not probed"]


def test_a_report_gets_a_few_lines():
    """What explains most first, the rest counted."""
    names = [f"rounding: add x{k} float32" for k in range(9)]
    a = manifest(*(fact(name, f"a{k}") for k, name in enumerate(names)), FULL)
    b = manifest(*(fact(name, f"b{k}") for k, name in enumerate(names)), TF32)
    brief = explain_arithmetic(a, b).brief()
    assert len(brief) == 4
    assert "TF32" in sentence(brief[0])
    assert sentence(brief[-1]) == "7 more differences of arithmetic; inspect -v lists a run's facts"


def asked(a, b):
    """The finding on two machines that were probed, and nothing else known of them."""
    runs = [SimpleNamespace(manifest=one) for one in (a, b)]
    measured = SimpleNamespace(reference=runs[0], candidate=runs[1], sites=[], missing=0)
    return find(measured).findings[0]


@pytest.mark.parametrize(
    ("one", "two", "kind"),
    [
        (FULL, FULL, "identical"),
        (order("a", 10), order("b", 20), "within_floor"),
        (FULL, TF32, "systematic"),
        (
            fact("ulp: exp float32", "1", digest="a", numbers={"worst": 1.0}),
            fact("ulp: exp float32", "900", digest="b", numbers={"worst": 900.0}),
            "systematic",
        ),
        (
            fact("ulp: exp float32", "1", digest="a", numbers={"worst": 1.0}),
            fact("ulp: exp float32", "2", digest="b", numbers={"worst": 2.0}),
            "within_floor",
        ),
        (FULL, fact("fma: add float32", "fused"), "undetermined"),
    ],
)
def test_the_verdict_on_two_probes(one, two, kind):
    """Another order is rounding, another precision is not."""
    a, b = manifest(one, source="probe"), manifest(two, source="probe")
    assert asked(a, b).kind == kind
    assert asked(manifest(one), b).role == "context"
