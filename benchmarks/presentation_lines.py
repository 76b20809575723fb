"""Lines that present answers: what makes a document, and what makes text or a page of it.

python benchmarks/presentation_lines.py
"""

from __future__ import annotations

from pathlib import Path

HOUSE = Path(__file__).parents[1] / "divergence"
PARTS = {
    "report/": ("report/*.py",),
    "sections of analyses and domains": ("analyses/**/sections.py", "domains/**/sections.py"),
    "sentences": ("**/sentences.py",),
    "html/ and its script and style": ("html/*",),
    "document.py": ("document.py",),
}


def main() -> None:
    total = 0
    for name, patterns in PARTS.items():
        files = [file for pattern in patterns for file in HOUSE.glob(pattern) if file.is_file()]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        total += lines
        print(f"{lines:6,}  {name}")
    print(f"{total:6,}  in all")


if __name__ == "__main__":
    main()
