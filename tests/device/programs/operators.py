"""Operators alone: replay, reproducers, the probe and the suite."""

from commands import captured, divergence, made


def answers(work, model) -> dict:
    found = {}
    captured(model, "n-ops", "npu", "--sites", "ops@model.layers.1", "--weights")
    made("replay", "n-ops", "-o", "on-device", "--device", "npu")
    made("replay", "n-ops", "-o", "on-host", "--device", "cpu")
    found["replayed"] = divergence("compare", "on-device", "on-host")
    found["itself"] = divergence("compare", "n-ops", "on-device")
    found["repro"] = divergence(
        "repro", "n-ops", "--site", "model.layers.1.mlp.down_proj/aten.mm:out", "-o", "bug"
    )
    made("probe", "--quick", "-o", "facts-host", "--device", "cpu")
    made("probe", "--quick", "-o", "facts", "--device", "npu")
    found["probe"] = divergence("compare", "facts-host", "facts")
    made("probe", "--quick", "-o", "facts-short", "--device", "npu", short_products=1)
    found["short products"] = divergence("compare", "facts-host", "facts-short")
    made("capture", "suite:llm", "-o", "suite-host", "--device", "cpu")
    made("capture", "suite:llm", "-o", "suite", "--device", "npu")
    made("truth", "suite-host", "-o", "suite-truth")
    found["suite"] = divergence("compare", "suite-host", "suite", "--truth", "suite-truth")
    made("capture", "suite:llm", "-o", "suite-wrong", "--device", "npu", wrong="silu")
    found["wrong suite"] = divergence(
        "compare", "suite-host", "suite-wrong", "--truth", "suite-truth"
    )
    # the vendor's own kernels in place of torch's
    vendors = ("--like", "suite-host", "--device", "npu", "--impl", "torch_npu")
    found["vendor's"] = made("capture", *vendors, "-o", "suite-vendor")
    compared = ("compare", "suite-host", "--truth", "suite-truth")
    found["vendor's suite"] = divergence(*compared, "suite-vendor")
    made("capture", *vendors, "-o", "suite-vendor-wrong", wrong="rsqrt")
    found["wrong vendor's suite"] = divergence(*compared, "suite-vendor-wrong")
    return found
