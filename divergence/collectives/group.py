"""Collectives of the process group that is there, each as a function of one rank's tensor.

The group is torch's: gloo on the CPU, nccl, xccl, hccl on accelerators, or the backend that
``--impl`` names (``gloo``, ``nccl``, ``hccl``, ``ccl``, ``xccl``, ``mpi``). Nothing here computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from divergence.collectives.cases import ROOT_RANK, Collective
from divergence.errors import UsageError
from divergence.recording.processes import Ranks
from divergence.run.manifest import Mesh, MeshAxis

__all__ = ["AXIS", "BACKENDS", "Call", "join", "native"]

AXIS = "group"
"""The one axis of the mesh."""

BACKENDS = ("gloo", "nccl", "hccl", "ccl", "xccl", "mpi")
_PACKAGES = {"hccl": ("torch_npu",), "ccl": ("oneccl_bindings_for_pytorch",)}
"""What registers a backend that torch itself has not."""

Call = Callable[[torch.Tensor], torch.Tensor]
"""One rank's input → its result, a tensor of its own."""


def join(num_ranks: int, device: str, backend: str | None) -> Ranks:
    """Join the other processes. Raises UsageError for a backend that is not here."""
    mesh = Mesh(axes=[MeshAxis(name=AXIS, size=num_ranks)])
    for package in _PACKAGES.get(backend or "", ()):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UsageError(f"--impl {backend} needs {package}, which is not here") from error
    if backend is not None and not dist.is_backend_available(backend):
        known = ", ".join(name for name in BACKENDS if dist.is_backend_available(name))
        raise UsageError(f"this torch has no backend {backend}", hint=f"it has {known}")
    return Ranks(mesh, device, backend=backend)


def backend_name(device: str) -> str:
    """``gloo``: what runs collectives on tensors of ``device``."""
    config = str(dist.get_backend_config())
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    return backends.get(device.partition(":")[0], dist.get_backend())


def native(collective: Collective) -> Call:
    """The group's own. Raises what torch raises for a dtype that the backend lacks."""
    calls: dict[Collective, Call] = {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "reduce_scatter": reduce_scatter,
        "rs_ag": lambda x: all_gather(reduce_scatter(x)),
        "all_gather": all_gather,
        "broadcast": _broadcast,
        "all_to_all": _all_to_all,
        "send_recv": lambda x: shift(x, 1),
    }
    return calls[collective]


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def _reduce(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.reduce(out, ROOT_RANK)
    return out


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    out = x.clone() if dist.get_rank() == ROOT_RANK else torch.zeros_like(x)
    dist.broadcast(out, ROOT_RANK)
    return out


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """(N,) → this rank's (N / n,)."""
    out = torch.zeros(x.numel() // dist.get_world_size(), dtype=x.dtype, device=x.device)
    _newer("reduce_scatter_single", "reduce_scatter_tensor")(out, x)
    return out


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """(c,) → (n · c,)."""
    out = torch.zeros(x.numel() * dist.get_world_size(), dtype=x.dtype, device=x.device)
    _newer("all_gather_single", "all_gather_into_tensor")(out, x)
    return out


def _all_to_all(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    return out


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """What rank r - ``by`` has, of x's shape; x goes to rank r + ``by``."""
    return exchange([(x, by)], [(torch.zeros_like(x), -by)])[0]


def exchange(
    sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]
) -> list[torch.Tensor]:
    """Send tensors to the ranks so far away, and fill others from those so far away."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works = [dist.P2POp(dist.irecv, chunk, (rank + by) % size) for chunk, by in received]
    works += [dist.P2POp(dist.isend, chunk.contiguous(), (rank + by) % size) for chunk, by in sent]
    if works:
        for work in dist.batch_isend_irecv(works):
            work.wait()
    return [chunk for chunk, _ in received]


def _newer(new: str, old: str) -> Any:
    """torch 2.13 renamed two of its functions."""
    return getattr(dist, new, None) or getattr(dist, old)
