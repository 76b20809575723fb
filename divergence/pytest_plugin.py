"""A plugin of pytest: a model's run held against a golden in a folder beside the test.

    def test_llama(divergence_golden):
        divergence_golden("llama", model="models/llama", prompts="Why is the sky blue?")

    def test_server(divergence_golden, tmp_path):
        divergence_golden("server", run=my_capture(tmp_path / "run"), policy="strict")

Goldens of the name ``llama`` lie in ``goldens/llama/`` beside the test file, one for each device
and dtype; the one that fits best is taken (gate.golden), which the end of pytest's output says.
``--divergence-bless`` makes the run the golden and prints how it differs from the old one.

pytest imports this module whenever it starts, so it imports nothing but pytest: torch comes with
the first golden.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from divergence.document import Document
    from divergence.gate.policy import Policy
    from divergence.gate.result import CheckResult
    from divergence.run.reader import Run

_OPTION = "--divergence-bless"
_PROPERTY = "divergence"


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option, in a group of its own."""
    parser.getgroup("divergence").addoption(
        _OPTION, action="store_true", help="store the runs of divergence_golden as the goldens"
    )


@pytest.fixture
def divergence_golden(request: pytest.FixtureRequest, tmp_path: Path) -> GoldenCheck:
    """Holds a run against the golden of a name; fails the test where the policy is not met."""
    return GoldenCheck(
        folder=request.path.parent / "goldens",
        scratch=tmp_path,
        bless=request.config.getoption(_OPTION),
        say=lambda text: request.node.user_properties.append((_PROPERTY, text)),
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what each test compared with or blessed. From reports, since tests may run in processes
    of their own (xdist)."""
    lines = [
        (report.nodeid, value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if lines:
        terminalreporter.section("divergence")
    for nodeid, text in lines:
        terminalreporter.write_line(f"{nodeid}: {text}")


class GoldenCheck:
    """``divergence_golden(NAME)``. ``folder``: where goldens lie; ``say``: told what was done."""

    def __init__(
        self, *, folder: Path, scratch: Path, bless: bool, say: Callable[[str], None]
    ) -> None:
        self._folder, self._scratch, self._bless, self._say = folder, scratch, bless, say

    def __call__(
        self,
        name: str,
        *,
        run: str | Path | Run | None = None,
        model: str | Path | None = None,
        policy: Policy | str | Path | None = None,
        truth: str | Path | Run | None = None,
        **options: Any,
    ) -> CheckResult | None:
        """Hold ``run``, or a capture of ``model`` with ``options`` (those of divergence.capture),
        against the golden ``name``; None where it was blessed. A capture that is blessed is kept as
        a sketch, unless ``store`` says otherwise.

        Fails the test where the policy is not met, where there is no golden, or where the two
        cannot be compared.
        """
        from divergence.errors import DivergenceError, UsageError

        if re.fullmatch(r"\w[\w-]*", name) is None:
            raise UsageError(
                f"{name!r} is no name of a golden",
                hint="letters, digits, _ and -: it names a folder",
            )
        if (run is None) == (model is None) or (run is not None and options):
            raise UsageError(
                "divergence_golden needs a run, or a model with options of capture",
                hint="divergence_golden(NAME, run=RUN), or (NAME, model=PATH, prompts=...)",
            )
        try:
            made = self._open(name, run, model, options)
            if self._bless:
                from divergence.gate.golden import bless, golden_name
                from divergence.report.checking import blessing_documents

                golden = self._folder / name / f"{golden_name(made)}.zip"
                self._say(_text(blessing_documents(bless(golden, str(made.path)))))
                return None
            return self._check(name, made, policy, truth)
        except DivergenceError as error:
            pytest.fail(f"divergence: {error}", pytrace=False)

    def _open(
        self, name: str, run: str | Path | Run | None, model: str | Path | None, options: Any
    ) -> Run:
        from divergence.recording.api import capture
        from divergence.run.reader import Run

        if run is not None:
            return Run.open(run)
        # what is held against a golden is judged by that one's truth
        options = {"store": "sketch"} | options if self._bless else {"truth": "no"} | options
        return capture(model, out=self._scratch / f"run-{name}", **options)

    def _check(
        self, name: str, run: Run, policy: Any, truth: str | Path | Run | None
    ) -> CheckResult:
        from divergence.errors import UsageError
        from divergence.gate.check import check
        from divergence.gate.golden import choose_golden
        from divergence.report.checking import check_documents

        folder = self._folder / name
        chosen = choose_golden(folder, run)
        if chosen is None:
            raise UsageError(f"there is no golden in {folder}", hint=f"pytest {_OPTION} stores one")
        result = check(chosen.path, run, policy=policy, truth=truth)
        self._say(f"{'passed' if result.passed else 'FAILED'}: held against {chosen.text}")
        if not result.passed:
            text = f"golden: {chosen.text}\n{_text(check_documents(result))}"
            pytest.fail(text, pytrace=False)
        return result


def _text(documents: list[Document]) -> str:
    from divergence.report.text import document_lines
    from divergence.words import printable

    return "\n".join(printable(line.text) for line in document_lines(*documents))
