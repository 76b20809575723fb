"""The layouts by the name that ``--format`` gives them; ``auto`` asks them in this order."""

from __future__ import annotations

from divergence.importing.dump import Layout
from divergence.importing.layouts import files, msprobe, sglang, sglang_dumper, transformers

__all__ = ["LAYOUTS"]

LAYOUTS: dict[str, Layout] = {
    "sglang": sglang,
    "sglang-dumper": sglang_dumper,
    "msprobe": msprobe,
    "transformers": transformers,
    "files": files,
}
