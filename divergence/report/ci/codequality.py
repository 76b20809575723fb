"""`check --codequality`: what is not met as GitLab's code quality report reads it.

A merge request shows what is new against its target branch by fingerprints, so a fingerprint is
made of the golden, the rule and the site, and of nothing that changes from run to run. A report
names files of the repository: the golden stands for the place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import PurePath

from divergence.comparison.result import strict_json
from divergence.report.ci.cases import CheckPage, RuleOutcome
from divergence.words import printable

__all__ = ["codequality_json"]

_MOST = 1000
"""Issues of a file; each is a row on a page."""


def codequality_json(page: CheckPage) -> str:
    """A list with one issue for each failure."""
    path = _in_repository(page.golden)
    seen: dict[str, int] = {}
    issues = []
    for check, text, site, severity in list(_issues(page))[:_MOST]:
        key = f"{path}\n{check}\n{site}"
        seen[key] = seen.get(key, 0) + 1  # a site fails once in each pass, step and prompt
        issues.append(
            {
                "description": text,
                "check_name": f"divergence.{check}",
                "fingerprint": hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest(),
                "severity": severity,
                "location": {"path": path, "lines": {"begin": 1}},
            }
        )
    return strict_json(issues)


def _issues(page: CheckPage) -> Iterator[tuple[str, str, str, str]]:
    for case in page.bad:
        for failure in case.failures:
            yield failure.rule, printable(failure.text), failure.site or "", _severity(case)
        if not case.failures:
            yield case.rule, case.text, "", _severity(case)


def _severity(case: RuleOutcome) -> str:
    if case.status == "stopped" or case.rule in ("verdicts", "whole"):
        return "critical"
    return "minor" if case.rule == "preflight" else "major"


def _in_repository(path: str) -> str:
    """``path`` from here, where it lies here; else its name alone, so that no home is told."""
    relative = os.path.relpath(path) if os.path.isabs(path) else os.path.normpath(path)
    if "://" in path or relative.startswith(".."):
        return PurePath(path).name or "golden"
    return PurePath(relative).as_posix()
