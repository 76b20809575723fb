"""Builds the simulated device once for each torch and source, and finds it there ever after.

The library lies in the user's cache (``XDG_CACHE_HOME``), or in ``SIMULATED_NPU_CACHE``. Two
processes that need it at once wait for one another.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["library", "why_not"]

SOURCE = Path(__file__).parents[1] / "source"
_COMPILERS = ("g++", "c++", "clang++")


def why_not() -> str | None:
    """Why no device can be built here; None where one can."""
    if os.name != "posix" or not hasattr(os, "memfd_create"):
        return "the simulated device needs Linux"
    if _compiler() is None:
        return f"the simulated device needs a compiler: {', '.join(_COMPILERS)}"
    return None


def library() -> Path:
    """The shared library, compiled if need be (15 to 40 s). RuntimeError with the compiler's own
    words where it cannot be."""
    import torch

    root = Path(torch.__file__).parent
    texts = [path.read_bytes() for path in sorted(SOURCE.iterdir())]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()[:12]
    folder = _cache() / f"torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"simulated_device-{digest}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            command = [
                _compiler() or _COMPILERS[0],
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-shared",
                "-w",
                "-fvisibility=hidden",
                "-fvisibility-inlines-hidden",
                f"-I{root / 'include'}",
                f"-I{root / 'include/torch/csrc/api/include'}",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                str(SOURCE / "device.cpp"),
                "-o",
                str(part),
                f"-L{root / 'lib'}",
                "-ltorch_cpu",
                "-ltorch",
                "-lc10",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{SOURCE} does not compile:\n{done.stderr[-4000:]}")
            part.rename(made)
    return made


def _compiler() -> str | None:
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def _cache() -> Path:
    given = os.environ.get("SIMULATED_NPU_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "divergence-tests"
