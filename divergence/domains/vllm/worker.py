"""vLLM imports these by name: the extension of its worker, and a loader that shows the weights.

A kernel may want its weights in another form: vLLM then packs them, and lets go of what it read.
So who a model is must be taken between reading and packing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

FORMAT = "divergence"
"""What the loader is called among vLLM's formats of checkpoints."""


class WorkerExtension:
    """Methods that vLLM's worker gets (``worker_extension_cls``), to be called by name."""

    def divergence_runner(self) -> Any:
        """Return what runs the model, and knows what each forward holds: in one process with the
        worker it is handed over as it is."""
        return self.model_runner  # type: ignore[attr-defined]


EXTENSION = f"{__name__}.{WorkerExtension.__name__}"


def register_loader(on_loaded: Callable[[torch.nn.Module], None]) -> None:
    """Have vLLM's format ``divergence`` read as its default does, and then call ``on_loaded``."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="auto"))

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            on_loaded(model)

    register_model_loader(FORMAT)(Loader)
