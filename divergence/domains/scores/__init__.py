"""Benchmark scores, paired document by document."""

from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="scores",
    commands=(
        Subcommand(
            "scores",
            "divergence.domains.scores.command:scores",
            "Compare benchmark scores document by document: is 41.4 against 39.9 a difference?",
            after="check",
        ),
    ),
    public={
        "ScoresReport": "divergence.domains.scores.result",
        "scores": "divergence.domains.scores.scores",
    },
    sentences={"evaluations": "divergence.domains.scores.sentences"},
    policies={"scores": "divergence.domains.scores.rows:ScoresPolicy"},
)
