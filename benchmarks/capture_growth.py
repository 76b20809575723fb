"""How the cost of a capture grows: with tokens, with blocks, with sites.

    python benchmarks/capture_growth.py [--svg docs/images/capture-growth.svg]

From a small model with a short prompt, tokens grow to 16 times, blocks to 8 times, and sites
from the blocks to every module. Of each: processor time that the capture adds to the bare model's
(one thread, medians of interleaved rounds), bytes stored, and how far the peak of resident memory
rises above the bare model's, in a process of its own. Time and bytes should grow with what is
seen, and memory should not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from divergence.run.captured import buffer_bytes

OVERHEAD = Path(__file__).with_name("capture_overhead.py")
BASE = {"hidden": 256, "blocks": 4, "vocab": 4000, "prompt": 64, "new": 8}


def measured(way: str, rounds: int, buffer: str, **shape: int) -> dict:
    """What capture_overhead.py says of one way at one size."""
    options = {**BASE, **shape, "rounds": rounds, "threads": 1, "buffer": buffer}
    done = subprocess.run(
        [sys.executable, str(OVERHEAD), "--work", way]
        + [word for name, value in options.items() for word in (f"--{name}", str(value))],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])[way]
    bare, own = statistics.median(found["bare cpu"]), statistics.median(found["way cpu"])
    return {
        "seen": found["seen"],
        "stored": found["stored"],
        "records": found["records"],
        "bare": bare,
        "added": own - bare,
        "grown": found["grown"],
    }


def series(rounds: int, buffer: str) -> dict[str, list[tuple[str, dict]]]:
    """By what grows: (label, figures) for each size."""

    def at(way: str, **shape: int) -> dict:
        found = measured(way, rounds, buffer, **shape)
        print(way, shape, found, file=sys.stderr)
        return found

    return {
        "tokens": [
            (f"×{times}", at("modules", prompt=64 * times, new=8)) for times in (1, 2, 4, 8, 16)
        ],
        "decode steps": [(f"×{times}", at("modules", new=8 * times)) for times in (1, 2, 4, 8, 16)],
        "blocks": [(f"×{times}", at("modules", blocks=4 * times)) for times in (1, 2, 4, 8)],
        "sites": [(sites, at(sites, prompt=512)) for sites in ("blocks", "mlp", "modules")],
    }


def table(found: dict[str, list[tuple[str, dict]]]) -> str:
    lines = [
        "| what grows | size | records | MB seen | MB stored | added CPU s | µs a record | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, points in found.items():
        for label, one in points:
            lines.append(
                f"| {name} | {label} | {one['records']:,} | {one['seen'] / 1e6:.1f} "
                f"| {one['stored'] / 1e6:.1f} | {one['added']:.2f} "
                f"| {one['added'] / one['records'] * 1e6:.0f} | {one['grown'] / 2**20:.0f} |"
            )
    return "\n".join(lines)


def plot(found: dict[str, list[tuple[str, dict]]], most_bytes: int) -> str:
    """An SVG: for tokens, decode steps and blocks the added time and the bytes, relative to those
    of the first size, and memory, relative to the buffer; and the line of what grows alike."""
    width, height, left, top = 760, 300, 50, 40
    panels = [name for name in ("tokens", "decode steps", "blocks") if name in found]
    inner = (width - left) / len(panels)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    colours = {"added": "#c0392b", "stored": "#2471a3", "grown": "#229954"}
    words = {
        "added": "added CPU time, × the first",
        "stored": "bytes stored, × the first",
        "grown": "peak memory, × --buffer",
    }
    for index, (what, colour) in enumerate(colours.items()):
        x = left + index * 200
        out.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="18">{words[what]}</text>')
    for index, name in enumerate(panels):
        points = found[name]
        sizes = [float(label.removeprefix("×")) for label, _ in points]
        unit = {what: max(points[0][1][what], 1e-9) for what in colours} | {"grown": most_bytes}
        most = max([sizes[-1]] + [one[what] / unit[what] for _, one in points for what in colours])
        x0, y0, w, h = left + index * inner, height - 40, inner - 40, height - 40 - top

        def place(size: float, value: float, x0=x0, y0=y0, w=w, h=h, most=most, end=sizes[-1]):
            return f"{x0 + w * (size - 1) / (end - 1):.1f},{y0 - h * min(value / most, 1):.1f}"

        out.append(
            f'<path d="M{x0:.1f},{top} V{y0} H{x0 + w:.1f}" fill="none" stroke="black"/>'
            f'<path d="M{place(1, 1)} L{place(sizes[-1], sizes[-1])}" stroke="#999" '
            'stroke-dasharray="4 3"/>'
            f'<text x="{x0 + w / 2:.1f}" y="{height - 10}" text-anchor="middle">{name}, ×</text>'
        )
        for size in sizes:
            x = x0 + w * (size - 1) / (sizes[-1] - 1)
            out.append(f'<text x="{x:.1f}" y="{y0 + 14}" text-anchor="middle">{size:g}</text>')
        out.append(f'<text x="{x0 - 4:.1f}" y="{top + 4}" text-anchor="end">{most:.0f}</text>')
        for what, colour in colours.items():
            pairs = [
                place(size, one[what] / unit[what])
                for size, (_, one) in zip(sizes, points, strict=True)
            ]
            out.append(
                f'<polyline points="{" ".join(pairs)}" fill="none" stroke="{colour}" '
                'stroke-width="2"/>'
            )
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--buffer", default="32MiB")
    parser.add_argument("--svg", type=Path, default=None, help="where to write the plot")
    args = parser.parse_args()
    found = series(args.rounds, args.buffer)
    print(f"Llama, hidden {BASE['hidden']}, float32, one thread, --buffer {args.buffer}\n")
    print(table(found))
    if args.svg is not None:
        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.write_text(plot(found, buffer_bytes(args.buffer)))


if __name__ == "__main__":
    main()
