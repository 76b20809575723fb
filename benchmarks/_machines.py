"""One CPU as several machines: captures in processes of their own, under other CPU switches.

One x86 CPU runs genuinely different kernels under ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA,
MKL_CBWR and OMP_NUM_THREADS. They are read when a process starts, so each machine is a
process that waits for requests (one JSON object a line) and makes runs. A machine of another name
is an accelerator: a device of torch (``cuda``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["SWITCHES", "Machine", "planting"]

ROOT = Path(__file__).resolve().parents[1]

_USUAL = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
SWITCHES: dict[str, dict[str, str]] = {
    "native": {},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-avx2": {"MKL_CBWR": "AVX2"},
    "threads-2": {"OMP_NUM_THREADS": "2"},
    "old": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
}
"""The machines; ``old`` is all of the oldest kernels together."""


_DEVICE = "DIVERGENCE_BENCHMARK_DEVICE"


class Machine:
    """A process under ``switches``. ``ask`` starts a capture, ``wait`` returns when it is made."""

    def __init__(self, name: str, *, python: str = sys.executable) -> None:
        """``python``: of an environment of its own."""
        self.name = name
        self._process = subprocess.Popen(
            [python, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                **os.environ,
                **SWITCHES.get(name, {}),
                _DEVICE: "cpu" if name in SWITCHES else name,
            },
        )

    def ask(
        self,
        what: str,
        *,
        fault: tuple[str, int, float] | None = None,
        operator_fault: tuple[str, str, float] | None = None,
        engine_fault: tuple[str, int, float] | None = None,
        is_code: bool = False,
        **values: Any,
    ) -> None:
        """``what``: ``capture`` or ``truth``, with its parameters. ``fault``: one of
        benchmarks._faults as (name, block, strength); ``operator_fault``: one of
        benchmarks._operator_faults as (name, site, strength); ``engine_fault``: one of
        benchmarks._engine_faults' modules as (name, block, strength); ``is_code``: the run's code
        is recorded as it is with the fault, else as the model's own."""
        assert self._process.stdin is not None
        request = {
            "what": what,
            "fault": fault,
            "operator_fault": operator_fault,
            "engine_fault": engine_fault,
            "is_code": is_code,
            "values": values,
        }
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Until the answer is there. Raises RuntimeError with what went wrong."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if answer.get("error"):
            raise RuntimeError(f"{self.name}: {answer['error']}")

    def run(self, what: str, **values: Any) -> None:
        """Ask and wait."""
        self.ask(what, **values)
        self.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def planting(
    plant: Callable[..., None], name: str, where: Any, strength: float, *, is_code: bool = False
) -> Callable[[Any], None]:
    """What ``capture(prepare=...)`` plants a fault with. A fault of kernels stands for what no
    source tells: the code that is recorded is the model's own, unless it ``is_code``."""
    from divergence.recording.engines import identity

    def prepare(model: Any) -> None:
        own = identity.code_notes
        notes = own(model)
        plant(model, name, where, strength=strength)

        def recorded(asked: Any) -> Any:
            identity.code_notes = own
            return notes if asked is model else own(asked)

        if not is_code:
            identity.code_notes = recorded

    return prepare


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write to the answers, a library's C++ neither
    import logging

    import torch

    from benchmarks import _engine_faults, _fault_patches, _faults, _operator_faults
    from divergence.recording.api import capture
    from divergence.recording.api import truth as make_truth

    logging.disable(logging.WARNING)
    _fault_patches.OF_RUNS_DTYPE = True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            values, fault = request["values"], request["fault"]
            if request["what"] == "truth":
                run = make_truth(values.pop("run"), force=True, **values)
            else:
                plant = _faults.plant
                if request["operator_fault"] is not None:
                    fault, plant = request["operator_fault"], _operator_faults.plant
                if request["engine_fault"] is not None:
                    fault, plant = request["engine_fault"], _engine_faults.plant
                if values.get("engine") == "compile":  # what was compiled counts to torch's limits
                    torch.compiler.reset()
                if fault is not None:
                    name, where, strength = fault
                    values["prepare"] = planting(
                        plant, name, where, strength, is_code=request["is_code"]
                    )
                run = capture(
                    values.pop("model", None), force=True, device=os.environ[_DEVICE], **values
                )
            run.close()
        except Exception as reason:
            error = f"{type(reason).__name__}: {reason}"
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
