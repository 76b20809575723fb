"""The cases of docs/cases.md, played through: each is one `divergence diff` of a real model.

    python benchmarks/cases.py [--old VENV] [--work DIR]

The model is SmolLM2-135M-Instruct in bfloat16 (benchmarks/_trained.py). ``--old``: a virtual
environment with divergence and transformers 4.57, for the first case, which is left out without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._trained import checkpoint  # noqa: E402

PROMPTS = """Why is the sky blue?
Name three rivers of Europe.
What is 17 times 23?
Write one sentence about the sea.
"""
MODEL, NEW, OLD = "SmolLM2-135M", "transformers-5.23", "transformers-4.57"
_COMMON = ["--chat", "--max-new-tokens", "8"]
CASES = {
    "versions": ["--python", f"{NEW},{OLD}", "--prompt", "Why is the sky blue?"],
    "precision": ["--dtype", "bfloat16,float16", "--prompts", "prompts.txt"],
    "batch": ["--batch", "1,4", "--prompts", "prompts.txt"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--work", type=Path, help="a directory for the runs, which are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cases-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        _prepare(work, args.old)
        for name, options in CASES.items():
            if name == "versions" and args.old is None:
                print("versions: left out, which takes --old VENV", file=sys.stderr)
                continue
            words = ["divergence", "diff", MODEL, *options, *_COMMON, "-o", name]
            print("$ " + " ".join(f"'{word}'" if " " in word else word for word in words))
            subprocess.run([sys.executable, "-m", *words], cwd=work, check=True)
            print(flush=True)


def _prepare(work: Path, old: Path | None) -> None:
    """A checkpoint whose config older versions read: without the quantisation that is null."""
    (work / "prompts.txt").write_text(PROMPTS)
    model = work / MODEL
    model.mkdir(exist_ok=True)
    for file in checkpoint("bfloat16").iterdir():
        target = model / file.name
        target.unlink(missing_ok=True)
        if file.name == "config.json":
            config = json.loads(file.read_text())
            config.pop("quantization_config", None)
            target.write_text(json.dumps(config, indent=1))
        else:
            target.symlink_to(file.resolve())
    for name, place in ((NEW, Path(sys.prefix)), (OLD, old)):
        if place is not None and not (work / name).exists():
            (work / name).symlink_to(place.resolve())


if __name__ == "__main__":
    main()
