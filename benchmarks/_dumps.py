"""Generated dumps of any size: two runs whose tensors all differ by rounding, and the same tensors
as msprobe stores them.

No tensor equals another: each is the drawn one, rolled by its number. Nothing is skipped by its
checksum, and nothing is stored once for twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from divergence.recording.api import capture
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ModuleNote, Sizes
from divergence.run.reader import Run
from divergence.run.writer import RunWriter
from tests.models.tiny import build

__all__ = ["drawn", "write_msprobe", "write_runs"]


def drawn(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, *, num_runs: int = 2
) -> Iterator[tuple[torch.Tensor, ...]]:
    """``count`` tensors as ``num_runs`` runs have them: the others are the first with 0.1 % of
    noise, each with its own."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    versions = [values]
    versions += [
        values * (1 + 1e-3 * torch.randn(shape, generator=generator)) for _ in range(num_runs - 1)
    ]
    flat = [version.to(dtype).view(-1) for version in versions]
    for number in range(count):
        yield tuple(one.roll(977 * number).view(shape) for one in flat)


def write_runs(
    folder: Path, count: int, shape: tuple[int, ...], dtype: torch.dtype, *, num_runs: int = 2
) -> list[Path]:
    """Runs of ``count`` blocks; the manifest is a real capture's."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build("llama", folder / "model")
    small = capture(str(model), out=folder / "small", max_new_tokens=1, device="cpu")
    paths, writers = [folder / f"run-{number}" for number in range(num_runs)], []
    for path in paths:
        manifest = Run.open(small.path).manifest
        manifest.sizes = Sizes()
        manifest.plan.modules = {
            f"model.layers.{n}": ModuleNote(kind="Block", role="block") for n in range(count)
        }
        writers.append(RunWriter(path, manifest))
    for number, versions in enumerate(drawn(count, shape, dtype, num_runs=num_runs)):
        for writer, tensor in zip(writers, versions, strict=True):
            writer.put(
                CapturedTensor(tensor),
                pass_="free",
                sample=0,
                step=0,
                site=f"model.layers.{number}:out",
                order=number,
            )
    for writer in writers:
        writer.close(complete=True)
    return paths


def write_msprobe(
    folder: Path, count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Path, Path]:
    """The same tensors as outputs of modules, in the folders that msprobe's debugger writes
    (mindstudio-probe 26: dump.json, stack.json, construct.json, one .pt file a tensor)."""
    paths = folder / "a", folder / "b"
    entries: tuple[dict, dict] = ({}, {})
    for path in paths:
        (path / "proc1" / "dump_tensor_data").mkdir(parents=True)
    for number, pair in enumerate(drawn(count, shape, dtype)):
        name = f"Module.layers.{number}.Block.forward.0"
        for path, known, tensor in zip(paths, entries, pair, strict=True):
            file = path / "proc1" / "dump_tensor_data" / f"{name}.output.0.pt"
            torch.save(tensor.clone(), file)
            wide = tensor.float()
            known[name] = {
                "input_args": [],
                "input_kwargs": {},
                "output": [
                    {
                        "type": "torch.Tensor",
                        "dtype": str(dtype),
                        "shape": list(shape),
                        "Max": wide.max().item(),
                        "Min": wide.min().item(),
                        "Mean": wide.mean().item(),
                        "Norm": wide.norm().item(),
                        "requires_grad": False,
                        "data_name": file.name,
                    }
                ],
            }
    for path, known in zip(paths, entries, strict=True):
        proc = path / "proc1"
        texts = {
            "dump": {
                "task": "tensor",
                "level": "L0",
                "framework": "pytorch",
                "dump_data_dir": str(proc / "dump_tensor_data"),
                "data": known,
            },
            "stack": {"0": [list(known), ["File model.py, line 1, in forward, \n x = block(x)"]]},
            "construct": dict.fromkeys(known),
        }
        for name, value in texts.items():
            (proc / f"{name}.json").write_text(json.dumps(value))
    return paths
