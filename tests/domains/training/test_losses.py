"""divergence compare of two files of losses."""

import json

import numpy as np
import pytest


@pytest.fixture
def files(tmp_path):
    """``files(0.05)`` → two files of losses, B that much higher."""

    def make(offset=0.0, n=400):
        rng = np.random.default_rng(0)
        a = 2 + 0.1 * rng.normal(size=n)
        b = a * (1 + offset + 1e-3 * rng.normal(size=n))
        for name, curve in (("a", a), ("b", b)):
            rows = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(curve)]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
        return "a.jsonl", "b.jsonl"

    return make


def test_the_verdict_leads(invoke, files):
    """Then what was compared, and the table."""
    code, out, _ = invoke("compare", *files())
    assert code == 0
    assert out.startswith("ALIGNED: the mean error of the loss is 0.0")
    for text in ("a rule of thumb", "40 steps of warm-up", "metric", "leaves the noise"):
        assert text in out


@pytest.mark.parametrize(("offset", "wanted"), [(0.0, 0), (0.05, 1)])
def test_exit_codes(invoke, files, offset, wanted):
    """0 aligned, 1 misaligned, and 0 without --exit-code."""
    two = files(offset)
    assert invoke("compare", *two, "--exit-code", "-q")[0] == wanted
    assert invoke("compare", *two)[0] == 0


def test_an_abstention_is_2(invoke, files):
    """With --exit-code; neither a pass nor a failure."""
    code, out, _ = invoke("compare", *files(n=20), "--exit-code")
    assert code == 2
    assert out.startswith("NO ANSWER")


def test_json_has_the_numbers(invoke, files):
    """In full precision."""
    answer = json.loads(invoke("compare", *files(0.05), "--json")[1])
    assert answer["schema_version"] == 1
    assert answer["verdict"]["kind"] == "misaligned"
    assert answer["metrics"][0]["mean_error"] == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a.jsonl",), "a comparison needs two"),
        (("a.jsonl", "run"), "losses are compared with losses"),
        (("run", "b.jsonl"), "losses are compared with losses"),
        (("a.jsonl", "b.jsonl", "a.jsonl"), "two are compared at a time"),
        (("a.jsonl", "b.jsonl", "--truth", "t"), "--truth: of runs"),
        (("a.jsonl", "b.jsonl", "--html", "x.html"), "--html: of runs"),
        (("a.jsonl", "none.jsonl"), "there is no file"),
        (("run", "run", "--warmup-steps", "5"), "these are runs"),
    ],
)
def test_bad_input(invoke, files, arguments, said):
    """Exit 2, with what is wrong."""
    files()
    code, _, err = invoke("compare", *arguments)
    assert code == 2
    assert said in err
