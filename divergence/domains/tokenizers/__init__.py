"""Two tokenizers, or chat templates, over a file of texts: where they part, and why."""

from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="tokenizers",
    commands=(
        Subcommand(
            "tokens",
            "divergence.domains.tokenizers.command:tokens",
            "Compare two tokenizers or chat templates over texts: which part, where, and why.",
            after="scores",
        ),
    ),
    public={
        "TokensReport": "divergence.domains.tokenizers.result",
        "compare_tokens": "divergence.domains.tokenizers.compare",
    },
    sentences={"tokenizers": "divergence.domains.tokenizers.sentences"},
)
