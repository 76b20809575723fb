"""Kernels of a backward that are wrong in one module: put under torch's own operators, so that no
mode, no hook and no code of the model sees a difference but in what they give."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["WrongKernels", "wrong_kernels"]

aten = torch.ops.aten


class WrongKernels:
    """``softmax``: a term of the softmax's backward has the wrong sign. ``mm``: the gradient of a
    weight is summed in bfloat16. In float64 all are right, as a truth needs."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.nodes = range(0)
        self.module: torch.nn.Module | None = None

    def into(self, fault: str | None, path: str = "") -> Callable[[torch.nn.Module], None]:
        """What ``capture(prepare=...)`` takes: ``fault`` in the module ``path``, or none."""

        def prepare(model: torch.nn.Module) -> None:
            self.fault, self.nodes = fault, range(0)
            self.module = model.get_submodule(path)
            self.weight = tuple(getattr(self.module, "weight", torch.empty(0)).shape)

        return prepare

    def begins(self, module: torch.nn.Module, *_: Any) -> None:
        if module is self.module:
            self.start = torch.autograd._get_sequence_nr()

    def ends(self, module: torch.nn.Module, *_: Any) -> None:
        if module is self.module:
            self.nodes = range(self.start, torch.autograd._get_sequence_nr())

    def _met(self, fault: str, gradient: torch.Tensor) -> bool:
        if self.fault != fault or gradient.dtype == torch.float64:
            return False
        node = torch._C._current_autograd_node()
        return node is not None and node._sequence_nr() in self.nodes

    def softmax(self, g: torch.Tensor, y: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        if self._met("softmax", g):
            return (y * g + y * (g * y).sum(dim, keepdim=True)).to(dtype)
        return aten._softmax_backward_data.out(
            g, y, dim, dtype, grad_input=torch.empty_like(g, dtype=dtype)
        )

    def mm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shape = a.shape[0], b.shape[1]
        if self._met("mm", a) and shape == self.weight:
            terms = torch.einsum("ik,kj->kij", a, b).bfloat16()
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            return total.to(a.dtype)
        return aten.mm.out(a, b, out=a.new_empty(shape))


@contextlib.contextmanager
def wrong_kernels() -> Iterator[WrongKernels]:
    """In place of torch's on the CPU; on exit torch's own are back."""
    wrong = WrongKernels()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator is overridden
        library.impl("_softmax_backward_data", wrong.softmax, "CPU", allow_override=True)
        library.impl("mm", wrong.mm, "CPU", allow_override=True)
    hooks = [  # of all modules: none of the model's own, which a run would tell as code of B's
        torch.nn.modules.module.register_module_forward_pre_hook(wrong.begins),
        torch.nn.modules.module.register_module_forward_hook(wrong.ends),
    ]
    try:
        yield wrong
    finally:
        for hook in hooks:
            hook.remove()
        library._destroy()
