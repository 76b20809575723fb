"""ONNX Runtime as an engine."""

from divergence.domain import Domain

DOMAIN = Domain(
    name="onnx",
    engines={"onnx": "divergence.domains.onnx.engine:OnnxEngine"},
    plain_engines=("onnx",),
)
