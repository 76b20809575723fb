"""ONNX Runtime as an engine."""

from divergence.domain import Domain, EngineClass

DOMAIN = Domain(
    name="onnx",
    engines={"onnx": EngineClass("divergence.domains.onnx.engine:OnnxEngine", plain=True)},
)
