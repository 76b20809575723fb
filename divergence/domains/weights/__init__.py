"""Two checkpoints, parameter by parameter: equal, rounded, in another order, or other weights."""

from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="weights",
    commands=(
        Subcommand(
            "weights",
            "divergence.domains.weights.command:weights",
            "Compare two checkpoints: which parameters differ, and how they are related.",
            after="scores",
        ),
    ),
    public={
        "WeightsReport": "divergence.domains.weights.result",
        "compare_weights": "divergence.domains.weights.compare",
    },
    sentences={"weights": "divergence.domains.weights.sentences"},
    hooks={
        "adapter": "divergence.domains.weights.adapter:open_adapter",
        "other_weights": "divergence.domains.weights.offer:other_weights",
    },
)
