"""The page of a large report: how large it becomes, and how long it takes to make.

    python benchmarks/page.py

Reports of made-up figures, blocks × steps × prompts in two passes, with every digit that real ones
have. What a browser needs to show the largest is held by tests/report/test_page_browser.py.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

from divergence.comparison.result import Background
from divergence.report.page import attached, page

FACTORY = Path(__file__).parents[1] / "tests" / "report" / "factory.py"
SIZES = ((12, 4, 1), (32, 16, 4), (60, 32, 4), (100, 64, 8))


def main() -> None:
    spec = importlib.util.spec_from_file_location("factory", FACTORY)
    assert spec is not None and spec.loader is not None
    factory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(factory)
    print("| blocks × steps × prompts | results | held in the page | kB | CPU seconds |")
    print("|---|---|---|---|---|")
    for blocks, steps, prompts in SIZES:
        report = factory.make_large_report(blocks, steps, prompts)
        _, kept = attached(report)
        start = time.process_time()
        text = page(report, Background())
        seconds = time.process_time() - start
        print(
            f"| {blocks} × {steps} × {prompts} | {len(report.sites):,} | {kept:,} "
            f"| {len(text.encode()) / 1000:,.0f} | {seconds:.1f} |"
        )


if __name__ == "__main__":
    main()
