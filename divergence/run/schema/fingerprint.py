"""Fingerprints: xxh3-128 of bytes, the same on every machine for the same values.

Used for equality (equal tensors stored once, equal weights recognised), not for
security: xxh3 is fast (memory speed) and not cryptographic.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import torch

__all__ = [
    "digest_json", "digest_many", "digest_tensor", "digest_text", "plain_tensor", "tensor_bytes",
]  # fmt: skip


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; little-endian, row-major."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, dense and contiguous on the CPU, no conjugation or sign pending."""
    import torch

    if (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
    ):
        return tensor  # the usual case, and hot
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def digest_tensor(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes as 32 hex digits. Moves it to the CPU where needed."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(plain_tensor(tensor)))


def digest_text(text: str) -> str:
    """xxh3-128 of the UTF-8 bytes."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def digest_json(value: Any) -> str:
    """xxh3-128 of canonical JSON: sorted keys, no spaces, so that key order does not matter."""
    return digest_text(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str))


def digest_many(digests: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """One digest over named digests, independent of their order."""
    pairs = digests.items() if isinstance(digests, Mapping) else digests
    return digest_text("\n".join(f"{name}={digest}" for name, digest in sorted(pairs)))
