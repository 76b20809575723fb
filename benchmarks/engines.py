"""Healthy pairs of engines: how far apart their blocks are, and what ``compare`` says.

    python benchmarks/engines.py [--engines compile] [--architectures llama qwen3] [--model DIR ...]
                                 [--dtypes float32 bfloat16] [--python ENGINE=PYTHON ...]
                                 [--hidden 128]

Small random models (3 blocks), or those of ``--model``. transformers makes the reference and the
truth, and the engine repeats it. The blocks' relative L2 is that of the anchored pass, where each
block got the reference's input: their range over prompts, steps and blocks where not 0.
An engine that lives in an environment of its own is run by ``--python vllm=/there/bin/python``;
vLLM's kernels want heads of 32 or more, so ``--hidden 128``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from divergence.comparison.api import compare  # noqa: E402
from divergence.recording.api import capture, truth  # noqa: E402
from tests.models.tiny import build  # noqa: E402

PROMPTS = ["The bridge was built", "one two three four"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", nargs="+", default=["compile"])
    parser.add_argument("--architectures", nargs="*", default=["llama", "qwen3"])
    parser.add_argument("--model", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PYTHON")
    args = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in args.python)
    print(
        "| model | dtype | engine | blocks, rel L2 | tokens equal | limit used | verdict | side |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        models = [(name, None) for name in args.architectures]
        models += [(Path(one).name, Path(one)) for one in args.model]
        for name, place in models:
            for dtype in args.dtypes:
                home = Path(folder) / f"{name}-{dtype}"
                model = place or build(
                    name, home / "model", dtype=dtype, num_blocks=3, hidden=args.hidden
                )
                a = capture(
                    str(model), out=home / "a", prompts=PROMPTS, max_new_tokens=args.tokens,
                    dtype=dtype, probe=False,
                )  # fmt: skip
                right = truth(a, out=home / "truth")
                for engine in args.engines:
                    repeated(home / "a", home / engine, engine, pythons.get(engine, sys.executable))
                    report = compare(a, home / engine, truth=right)
                    blocks = [
                        site.rel_l2
                        for site in report.sites
                        if site.pass_ == "anchored" and site.role == "block" and site.rel_l2
                    ]
                    usage = max((site.limit_usage or 0.0) for site in report.sites)
                    tokens = report.tokens
                    print(
                        f"| {name} | {dtype} | {engine} | "
                        f"{min(blocks, default=0):.1e} to {max(blocks, default=0):.1e} | "
                        f"{tokens.num_equal} of {tokens.num_tokens} | {usage:.0%} | "
                        f"{report.verdict.kind} | {report.verdict.side or '-'} |",
                        flush=True,
                    )


def repeated(run: Path, out: Path, engine: str, python: str) -> None:
    """``run`` again, by the engine, in a process of its own."""
    command = [python, "-m", "divergence", "capture", "--like", str(run), "--engine", engine,
               "-o", str(out), "-q", "--no-probe"]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)


if __name__ == "__main__":
    main()
