"""Quantisation: schemes simulated on any device, what they cost, and codes that were recorded."""

from divergence.domain import AnalysisPackage, Claim, Domain, EngineClass, Subcommand

DOMAIN = Domain(
    name="quantization",
    commands=(
        Subcommand(
            "quantize",
            "divergence.domains.quantization.command:quantize",
            "What quantisation costs a model, which matrices pay it, and which to keep out of it.",
            after="sensitivity",
        ),
    ),
    public={
        "Quantization": "divergence.domains.quantization.result",
        "quantize": "divergence.domains.quantization.quantize",
    },
    analyses={"codes": AnalysisPackage("divergence.domains.quantization.codes", after="blocks")},
    claims={"codes_wrong": Claim(40)},  # seen in equal inputs, as an error that is made at a site
    hooks={
        "other_codes": "divergence.domains.quantization.show:told_by",
        "watch": "divergence.domains.quantization.watching:watched",
        "identity": "divergence.domains.quantization.checkpoint:identity",
    },
    engines={
        "quantize": EngineClass("divergence.domains.quantization.engine:QuantizeEngine", plain=True)
    },
    sentences={
        "codes": "divergence.domains.quantization.codes.sentences",
        "quantization": "divergence.domains.quantization.sentences",
    },
)
