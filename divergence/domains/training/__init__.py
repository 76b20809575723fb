"""Training: a step, recorded; gradients that are off together, its plan, policies, losses."""

from divergence.domain import Addition, AnalysisPackage, Domain, Files

DOMAIN = Domain(
    name="training",
    adds={
        "compare": Addition(
            options="divergence.domains.training.options:LossOptions",
            files=Files(
                noun="losses",
                recognise="divergence.domains.training.reading:is_losses",
                command="divergence.domains.training.command:compare",
            ),
            help="Two files of losses (JSON lines, CSV, trainer_state.json, TensorBoard's events) "
            "are compared step by step: the mean relative error, and where the difference leaves "
            "its noise.",
            examples=(
                "divergence compare gpu.jsonl npu.jsonl --exit-code       # curves of losses",
            ),
        ),
        "capture": Addition(
            options="divergence.domains.training.options:PlanOptions",
            groups={"training": "divergence.domains.training.options:TrainOptions"},
        ),
    },
    public={
        "LossReport": "divergence.domains.training.result",
        "TrainOptions": "divergence.domains.training.options",
        "compare_losses": "divergence.domains.training.judging",
    },
    analyses={"gradients": AnalysisPackage("divergence.domains.training.gradients")},
    hooks={
        "step_options": "divergence.domains.training.recording.options:settled",
        "step": "divergence.domains.training.recording.step:session_of",
        "plan": "divergence.domains.training.plan:plan",
        "plan_sections": "divergence.domains.training.sections:sections",
    },
    sentences={
        "gradients": "divergence.domains.training.gradients.sentences",
        "training": "divergence.domains.training.sentences",
    },
)
