"""The checklist of a fair comparison, and the ladder of causes, of two runs."""

from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="doctor",
    commands=(
        Subcommand(
            "doctor",
            "divergence.domains.doctor.command:doctor",
            "Go through the checklist with two runs: what to settle first, and which cause it is.",
            after="replay",
        ),
    ),
    public={
        "Checkup": "divergence.domains.doctor.result",
        "doctor": "divergence.domains.doctor.doctor",
    },
    sentences={"checklist": "divergence.domains.doctor.sentences"},
)
