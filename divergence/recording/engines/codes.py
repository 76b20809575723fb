"""Codes: the stored weights of a compressed-tensors checkpoint, and what they stand for.

Where no kernel multiplies codes, as on a CPU, transformers has compressed-tensors dequantise every
weight before the first forward: code × scale, rounded to the scale's dtype. That is done here when
the model is loaded, so that every pass runs the same weights; the codes are kept beside them (one
byte an element and less). They are what is hashed, since they are what the checkpoint holds. And
they are what a wider pass computes with: code × scale in its own dtype, so that a truth has the
scheme's integers exactly, without the rounding of a weight that no kernel for codes makes.

Activations are quantised by the library's own code in the forward; under a wider dtype its scales,
quotients and zero points are wide, its codes the nearest integers of those (ties to even).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from divergence.errors import ModelError


class QuantizedCodes:
    """Of each quantised module: its stored tensors, and how they become a weight."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[nn.Module, dict[str, torch.Tensor], Any]] = {}

    def keep(self, path: str, module: nn.Module, scheme: Any) -> None:
        """The module as it was loaded, before its weight is dequantised."""
        self._of[path] = module, _own(module), scheme

    @property
    def paths(self) -> list[str]:
        return list(self._of)

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name → tensor, as the checkpoint has them."""
        for path, (_, tensors, _) in self._of.items():
            for name, tensor in tensors.items():
                yield f"{path}.{name}", tensor

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Module → what its codes became."""
        for path, (module, _, _) in self._of.items():
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            yield path, weight

    def by_storage(self) -> dict[int, str]:
        """Where each dequantised weight lies → its module."""
        return {weight.untyped_storage().data_ptr(): path for path, weight in self.weights()}

    def exact(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        """Code × scale, computed in ``dtype``."""
        from compressed_tensors.compressors.base import BaseCompressor

        _, tensors, scheme = self._of[path]
        wide = {
            name: tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
            for name, tensor in tensors.items()
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
        weight: torch.Tensor = compressor.decompress(wide, scheme)["weight"]
        return weight.to(dtype)


def dequantize(model: nn.Module, source: str) -> QuantizedCodes | None:
    """Dequantise a compressed-tensors model now, instead of in its first forward. None where it is
    none, or where its weights are brought in only when they are needed."""
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is None or any(weight.is_meta for weight in model.parameters()):
        return None
    from compressed_tensors.compressors.base import decompress_module

    codes = QuantizedCodes()
    for path, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        codes.keep(path, module, scheme)
        try:
            decompress_module(module)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"the codes of {path} cannot be dequantised: {error}",
                where=source,
                hint="are its tensors those that quantization_config in config.json names?",
            ) from error
    hook.remove()
    del model.ct_decompress_hook
    return codes


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers, not those of modules in it."""
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
