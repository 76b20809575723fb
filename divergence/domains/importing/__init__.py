"""Makes runs of what other tools dumped."""

from divergence.domain import Domain, Subcommand

DOMAIN = Domain(
    name="importing",
    commands=(
        Subcommand(
            "import",
            "divergence.domains.importing.command:import_",
            "Make a run of what SGLang, msprobe or transformers' debugger dumped, or of files.",
            after="unpack",
        ),
    ),
    public={"import_dump": "divergence.domains.importing.importing"},
)
