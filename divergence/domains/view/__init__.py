"""A comparison in the terminal, to look through."""

from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="view",
    commands=(
        Subcommand(
            "view",
            "divergence.domains.view.command:view",
            "Look through a comparison in this terminal: blocks, modules, prompts, steps.",
            after="compare",
        ),
    ),
)
