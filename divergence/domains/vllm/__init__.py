"""vLLM as an engine."""

from divergence.domain import Domain

DOMAIN = Domain(name="vllm", engines={"vllm": "divergence.domains.vllm.engine:VllmEngine"})
