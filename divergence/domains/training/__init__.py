"""Training: curves of losses."""

from divergence.domain import Addition, Domain, Files

DOMAIN = Domain(
    name="training",
    adds={
        "compare": Addition(
            options="divergence.domains.training.command:LossOptions",
            help="Two files of losses (JSON lines, CSV, trainer_state.json, TensorBoard's events) "
            "are compared step by step: the mean relative error, and where the difference leaves "
            "its noise.",
            examples=(
                "divergence compare gpu.jsonl npu.jsonl --exit-code       # curves of losses",
            ),
        )
    },
    files=(
        Files(
            noun="losses", recognise="divergence.training.curves.reading:is_losses",
            command="divergence.domains.training.command:compare",
        ),
    ),
)  # fmt: skip
