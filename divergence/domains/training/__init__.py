"""Training: a step, recorded; gradients that are off together, its plan, policies, losses."""

from divergence.domain import Addition, Domain, Files

DOMAIN = Domain(
    name="training",
    adds={
        "compare": Addition(
            options="divergence.domains.training.options:LossOptions",
            help="Two files of losses (JSON lines, CSV, trainer_state.json, TensorBoard's events) "
            "are compared step by step: the mean relative error, and where the difference leaves "
            "its noise.",
            examples=(
                "divergence compare gpu.jsonl npu.jsonl --exit-code       # curves of losses",
            ),
        ),
        "capture": Addition(options="divergence.domains.training.options:PlanOptions"),
    },
    files=(
        Files(
            noun="losses",
            recognise="divergence.domains.training.reading:is_losses",
            command="divergence.domains.training.command:compare",
        ),
    ),
    public={
        "LossReport": "divergence.domains.training.result",
        "compare_losses": "divergence.domains.training.judging",
    },
    analyses={"gradients": "divergence.domains.training.gradients"},
    plans={"training": "divergence.domains.training"},
    steps={"train": "divergence.domains.training.recording"},
    readers={"precision_policy": "divergence.domains.training.policies:read_policy"},
    sentences={
        "gradients": "divergence.domains.training.gradients.sentences",
        "training": "divergence.domains.training.sentences",
    },
)
