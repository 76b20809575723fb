"""Reports for programs: strict, versioned JSON and CSV with full precision.

JSON holds no nan and no inf, so those are the strings "nan", "inf" and "-inf".
Every document has ``schema_version``; keys are only ever added within a version.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import msgspec

from divergence.comparison.result import REPORT_SCHEMA_VERSION, Report, strict_json
from divergence.comparison.results import LogitsDiff, NonfiniteCount, SiteResult, TruthDiff
from divergence.numerics.sums import Estimate
from divergence.words import printable

__all__ = ["blessing_json", "check_json", "csv_columns", "report_csv", "strict_json"]


def check_json(result: Any) -> str:
    """The answer of `check`, a CheckResult of divergence.gate.check.

    Its report is the one that `compare --json` gives.
    """
    return strict_json(
        {
            "schema_version": REPORT_SCHEMA_VERSION,
            "passed": result.passed,
            "num_ties": result.num_ties,
            "excused": result.excused,
            "known": msgspec.to_builtins(result.known),
            "notes": result.notes,
            "failures": msgspec.to_builtins(result.failures),
            "policy": msgspec.to_builtins(result.policy),
            "report": msgspec.to_builtins(result.report),
        }
    )


def blessing_json(blessing: Any) -> str:
    """The answer of `check --bless`, a Blessing of divergence.gate.golden."""
    return strict_json(
        {"schema_version": REPORT_SCHEMA_VERSION, "blessed": msgspec.to_builtins(blessing)}
    )


def csv_columns() -> list[str]:
    """The columns of the CSV, whatever a report holds."""
    names: list[str] = []
    for name in SiteResult.__struct_encode_fields__:
        if name == "prompts":
            continue  # a list of its own
        nested = {
            "logits": LogitsDiff,
            "nonfinite": NonfiniteCount,
            "truth": TruthDiff,
            "estimated": Estimate,
        }.get(name)
        if nested is None:
            names.append(name)
        else:
            names += [f"{name}_{key}" for key in nested.__struct_encode_fields__]
    return names


def report_csv(report: Report) -> str:
    """One line per compared site; an absent number is an empty cell.

    Shapes are written ``1x12x64`` and indices ``0 3 17``.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, csv_columns(), restval="", lineterminator="\n")
    writer.writeheader()
    for row in report.to_records():
        for key, value in row.items():
            if isinstance(value, list | tuple):
                row[key] = ("x" if key == "shape" else " ").join(str(size) for size in value)
            elif isinstance(value, str):
                row[key] = printable(value)
        writer.writerow(row)
    return file.getvalue()
