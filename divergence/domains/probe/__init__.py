"""The probe finds from outside how a machine adds, rounds and multiplies: the order of additions,
the width of sums, elementary functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.domain import AnalysisPackage, Claim, Domain, SelftestStep, Subcommand

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured

_AT = "divergence.domains.probe"

STEPS = (SelftestStep("arithmetic", f"{_AT}.quick:tried"),)
DOMAIN = Domain(
    name="probe",
    commands=(
        Subcommand(
            "probe",
            f"{_AT}.command:probe",
            "Find out from outside what this machine's arithmetic does.",
            after="repro",
        ),
    ),
    public={"probe": f"{_AT}.api"},
    analyses={"arithmetic": AnalysisPackage(_AT, after="tokens")},
    claims={"arithmetic": Claim(20, measured=False, alone=True)},
    hooks={"arithmetic": f"{_AT}.quick:quick_facts", "selftest": f"{_AT}:STEPS"},
    sentences={"probe": f"{_AT}.sentences"},
)


def applies(measured: Measured) -> bool:
    """Was a machine probed?"""
    return bool(measured.reference.manifest.arithmetic or measured.candidate.manifest.arithmetic)
