"""A host's run and the device's, in every form in which a run is kept."""

from commands import captured, divergence, made


def answers(work, model) -> dict:
    found = {}
    captured(model, "c", "cpu", "--sites", "modules")
    captured(model, "n", "npu", "--sites", "modules")
    found["measured there"] = divergence("compare", "c", "n", "--device", "npu")
    captured(model, "c-ops", "cpu", "--sites", "ops@model.layers.1")
    made("capture", "--like", "c-ops", "-o", "n-ops", "--device", "npu:1", "--no-probe")
    found["operators"] = divergence("compare", "c-ops", "n-ops")
    made(
        "capture",
        "--like",
        "c",
        "-o",
        "n-changed",
        "--device",
        "npu",
        "--only-changed",
        "--no-probe",
    )
    found["only changed"] = divergence("compare", "c", "n-changed")
    for mode in ("sketch", "stats", "hash"):
        captured(model, f"c-{mode}", "cpu", "--store", mode)
        made("capture", "--like", f"c-{mode}", "-o", f"n-{mode}", "--device", "npu", "--no-probe")
        found[mode] = divergence("compare", f"c-{mode}", f"n-{mode}")
        captured(model, f"n2-{mode}", "npu", "--store", mode)
        made("capture", "--like", f"n2-{mode}", "-o", f"c2-{mode}", "--device", "cpu", "--no-probe")
        found[f"{mode}, device first"] = divergence("compare", f"n2-{mode}", f"c2-{mode}")
    # the writer's thread waits for events of a device that it must set first
    captured(model, "n-strict", "npu", strict_threads=1)
    found["threads"] = divergence("compare", "c", "n-strict")
    # products of float64 are not to be had, sums are
    captured(model, "n-sums", "npu", "--store", "sketch", no_float64_products=1)
    found["no float64 products"] = divergence("compare", "n-sketch", "n-sums")
    return found
