"""Quantisers that are wrong, planted in quantised models, and healthy ones: what compare says.

    python benchmarks/quantizers.py            # a table; fails where an answer is wrong

Tiny models of three architectures in W8A8 (compressed-tensors' own code runs them), in bfloat16 and
float32. Each fault is put into one quantiser of block 1 on B's side. Healthy pairs: another
attention implementation, and another set of CPU kernels in a process of its own. In bfloat16 B
makes an escalated pass, too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from divergence import MachineOptions, RecordOptions
from divergence.comparison.api import compare
from divergence.comparison.result import Report
from divergence.recording.api import capture, truth
from divergence.run.reader import Run
from tests.models import quantized, tiny

__all__ = ["FAULTS", "planted"]

PROMPTS = [
    "A bridge is built twice: once on paper, where every beam is exact.",
    "Snow fell on the quiet town.",
    "x = [i for i in range(10)]",
]
MODULES = {
    "llama": "model.layers.1.mlp.down_proj",
    "qwen3-moe": "model.layers.1.self_attn.o_proj",
    "bert": "bert.encoder.layer.1.intermediate.dense",
}
FAULTS = (
    "truncating cast",
    "1/128 for 1/127.5",
    "wrapped overflow",
    "scale per tensor",
    "lost zero point",
    "float16 accumulation",
)
OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


@contextlib.contextmanager
def planted(fault: str, model: torch.nn.Module, path: str) -> Iterator[None]:
    """Put a fault into the quantiser (or the product) of one module, as long as it lasts."""
    from compressed_tensors.quantization.lifecycle import forward as library

    target = model.get_submodule(path)
    scales, fake = library.compute_dynamic_scales_and_zp, library.fake_quantize
    whole = library.forward_quantize
    inside: list[bool] = []

    def forward_quantize(module: Any, value: Any, base_name: str, args: Any) -> Any:
        inside.append(module is target and base_name == "input")
        try:
            return whole(module, value, base_name, args)
        finally:
            inside.pop()

    def wrong_scales(value: Any, args: Any, module: Any, **rest: Any) -> Any:
        scale, zero = scales(value=value, args=args, module=module, **rest)
        if module is not target:
            return scale, zero
        if fault == "1/128 for 1/127.5":
            scale = scale * (127.5 / 128)
        elif fault == "scale per tensor":
            scale = scale.amax().expand_as(scale).contiguous()
        return scale, zero

    def wrong_codes(x: Any, scale: Any, zero_point: Any, args: Any, **rest: Any) -> Any:
        if not (inside and inside[-1]):
            return fake(x=x, scale=scale, zero_point=zero_point, args=args, **rest)
        zero = zero_point.to(x.dtype)
        number = x / scale + zero
        if fault == "truncating cast":
            codes = number.clamp(-128, 127).trunc()
        elif fault == "wrapped overflow":
            codes = (number.round() + 128).remainder(256) - 128
        elif fault == "lost zero point":
            codes = (x / scale).clamp(-128, 127).round()
        else:
            codes = number.clamp(-128, 127).round()
        return (codes - zero) * scale

    def in_float16(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Sums of 16 products each, added in float16, where an int32 holds them exactly."""
        x = whole(module, args[0], "input", module.quantization_scheme.input_activations)
        total = torch.zeros_like(output, dtype=torch.float16)
        for piece, weight in zip(x.split(16, -1), module.weight.split(16, -1), strict=True):
            total = total + (piece.float() @ weight.float().T).half()
        total = total if module.bias is None else total + module.bias
        return total.to(output.dtype)

    library.forward_quantize = forward_quantize
    library.compute_dynamic_scales_and_zp = wrong_scales
    if fault in ("truncating cast", "wrapped overflow", "lost zero point"):
        library.fake_quantize = wrong_codes
    hook = target.register_forward_hook(in_float16) if "float16" in fault else None
    try:
        yield
    finally:
        library.forward_quantize = whole
        library.compute_dynamic_scales_and_zp, library.fake_quantize = scales, fake
        if hook is not None:
            hook.remove()


@contextlib.contextmanager
def on_loading(fault: str, path: str) -> Iterator[None]:
    """Plant it into the next model that is loaded."""
    from divergence.recording.engines import sessions

    load = sessions.load_model
    with contextlib.ExitStack() as stack:

        def load_faulty(*args: Any, **how: Any) -> Any:
            loaded = load(*args, **how)
            stack.enter_context(planted(fault, loaded.module, path))
            return loaded

        sessions.load_model = load_faulty
        try:
            yield
        finally:
            sessions.load_model = load


def answer(report: Report) -> str:
    verdict = report.verdict
    where = verdict.onset.site if verdict.onset else "-"
    return f"{verdict.kind}, {verdict.side}, {verdict.confidence}, {where}"


def main(names: list[str]) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for architecture, path in MODULES.items():
            for dtype in ("bfloat16", "float32"):
                for scheme in ("w8a8", "w8a8-asymmetric"):
                    if not names or architecture in names:
                        work = Path(folder, f"{architecture}-{dtype}-{scheme}")
                        wrong += _of_model(work, architecture, dtype, scheme, path)
    print(f"{wrong} wrong")
    return int(wrong > 0)


def _of_model(work: Path, architecture: str, dtype: str, scheme: str, path: str) -> int:
    source = tiny.build(architecture, work / "plain", dtype=dtype)
    model = quantized.build(source, work / "model", scheme)
    tokens = 1 if architecture == "bert" else 4
    a = capture(
        model,
        out=work / "a",
        prompts=PROMPTS,
        max_new_tokens=tokens,
        machine=MachineOptions(probe=False),
    )
    escalate = dtype == "bfloat16"
    how: dict[str, Any] = {
        "like": a,
        "probe": False,
        "recording": RecordOptions(escalate=escalate),
    }
    true, wrong = truth(a, out=work / "t"), 0
    title = f"{architecture:10s} {dtype:9s} {scheme:16s}"
    if scheme == "w8a8":
        c = capture(out=work / "c", attn_implementation="sdpa", **how)
        program = (
            "import sys; from divergence import RecordOptions, capture; capture(like=sys.argv[1], "
            f"out=sys.argv[2], probe=False, recording=RecordOptions(escalate={escalate}))"
        )
        command = [sys.executable, "-c", program, str(work / "a"), str(work / "d")]
        subprocess.run(command, env=os.environ | OTHER_KERNELS, check=True)
        for name, run in (("sdpa", c), ("other kernels", Run.open(work / "d"))):
            report = compare(a, run, truth=true)
            bad = report.verdict.kind not in ("within_floor", "identical")
            wrong += bad
            print(f"{title} {name:21s} {'WRONG ' if bad else ''}{answer(report)}", flush=True)
    for number, fault in enumerate(FAULTS):
        if (fault == "lost zero point") != (scheme == "w8a8-asymmetric"):
            continue
        with on_loading(fault, path):
            b = capture(out=work / f"b{number}", **how)
        report = compare(a, b, truth=true)
        verdict, block = report.verdict, path.partition(".1.")[0] + ".1"
        right = verdict.onset is not None and verdict.onset.block == block
        right = right and verdict.side == "candidate"
        missed = verdict.kind in ("within_floor", "identical", "undetermined")
        wrong += not (right or missed)
        word = "" if right else "missed " if missed else "WRONG "
        print(f"{title} {fault:21s} {word}{answer(report)}", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
