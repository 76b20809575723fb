"""vLLM as an engine."""

from divergence.domain import Domain, EngineClass

DOMAIN = Domain(
    name="vllm", engines={"vllm": EngineClass("divergence.domains.vllm.engine:VllmEngine")}
)
