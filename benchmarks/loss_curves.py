"""Curves of losses: how often a healthy pair is called apart, and where a drift is found.

    python benchmarks/loss_curves.py [--pairs 1000] [--trained 3] [--steps 400]

Simulated: pairs of one falling curve with the noise of batches, the same in both, whose relative
differences are noise of 0.1 to 0.3% of a step, plus a drift or an offset that begins at step k.

Trained: a Llama of 3 blocks learns the same batches twice; the second time with other kernels
(ATEN_CPU_CAPABILITY=default), or with a fault in the optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

HEALTHY = {
    "independent": lambda r, n: 1e-3 * r.normal(size=n),
    "grows 400 times": lambda r, n: 1e-5 * r.normal(size=n) * np.exp(np.linspace(0, 6, n)),
    "spikes (Student's t, 3)": lambda r, n: 1e-3 * r.standard_t(3, size=n),
    "alike for 2 steps": lambda r, n: 1e-3 * _alike(r, n, 0.5),
    "alike for 10 steps": lambda r, n: 1e-3 * _alike(r, n, 0.9),
    "alike for 50 steps": lambda r, n: 1e-3 * _alike(r, n, 0.98),
}

FAULTS: dict[str, dict[str, Any]] = {
    "other kernels": {"kernels": True},
    "learning rate 20% higher": {"rate": 1.2},
    "second moment with beta 0.5": {"beta": 0.5},
    "gradients of one block lost from half-way": {"lost": True},
    "learning rate doubled from half-way": {"doubled": True},
}


def _alike(rng: Any, n: int, share: float) -> Any:
    noise = rng.normal(size=n)
    noise[0] /= np.sqrt(1 - share**2)
    for t in range(1, n):
        noise[t] += share * noise[t - 1]
    return noise * np.sqrt(1 - share**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--trained", type=int, default=3, help="seeds; 0: none")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n".join(map(json.dumps, _train(**json.loads(args.one)))))
        return
    _healthy(args.pairs)
    _drifts(args.pairs // 10)
    if args.trained:
        _trained(args.trained, args.steps)


def pair(rng: Any, diffs: Any) -> tuple[Any, Any]:
    """Two simulated curves (n,) with these relative differences."""
    n = len(diffs)
    loss = 2 + 3 * np.exp(-np.arange(n) / (n / 5)) + 0.1 * rng.normal(size=n)
    return loss, loss * (1 + diffs)


def verdict(a: Any, b: Any) -> Any:
    from divergence.domains.training.judging import compare_curves
    from divergence.domains.training.reading import Curves

    curves = [
        Curves(path=name, metrics={"loss": dict(enumerate(map(float, curve)))})
        for name, curve in (("a", a), ("b", b))
    ]
    return compare_curves(*curves)


def _healthy(pairs: int) -> None:
    print(f"{pairs} healthy pairs: leaves the noise / not aligned\n")
    lengths = (100, 300, 1000, 5000)
    print("| noise of the difference | " + " | ".join(f"{n} steps" for n in lengths) + " |")
    print("|---|" + "---|" * len(lengths))
    for name, make in HEALTHY.items():
        cells = []
        for n in lengths:
            rng = np.random.default_rng(n)
            found = [verdict(*pair(rng, make(rng, n))) for _ in range(pairs)]
            left = sum(one.metrics[0].trend.state == "parts" for one in found)
            bad = sum(one.verdict.kind != "aligned" for one in found)
            cells.append(f"{left / pairs:.1%} / {bad / pairs:.1%}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def _drifts(pairs: int) -> None:
    print(
        f"\n1000 steps, noise 0.3%, {pairs} pairs each: left the noise; near step (10, 50, 90%)\n"
    )
    print("| from step | a straight line to 1% | to 3% | an offset of 0.3% | of 3% |")
    print("|---|---|---|---|---|")
    for k in (0, 200, 500, 800):
        cells = []
        for shape, size in (("line", 0.01), ("line", 0.03), ("offset", 0.003), ("offset", 0.03)):
            rng, at = np.random.default_rng(k), []
            for _ in range(pairs):
                diffs = 3e-3 * rng.normal(size=1000)
                diffs[k:] += size * (np.linspace(0, 1, 1000 - k) if shape == "line" else 1)
                trend = verdict(*pair(rng, diffs)).metrics[0].trend
                if trend.state == "parts":
                    at.append(trend.parts_at)
            places = ", ".join(f"{q:.0f}" for q in np.percentile(at, [10, 50, 90])) if at else "-"
            cells.append(f"{len(at) / pairs:.0%}; {places}")
        print(f"| {k} | " + " | ".join(cells) + " |", flush=True)


def _trained(seeds: int, steps: int) -> None:
    from divergence.domains.training.judging import compare_losses

    print(f"\ntrained twice, {steps} steps, {seeds} seeds\n")
    print("| the second time | verdicts | mean error | at the end | leaves the noise near |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        plain = [_run(Path(folder), f"a{s}", {"seed": s, "steps": steps}) for s in range(seeds)]
        for name, how in FAULTS.items():
            found = []
            for seed in range(seeds):
                other = _run(Path(folder), f"b{seed}", {"seed": seed, "steps": steps, **how})
                found.append(compare_losses(plain[seed], other))
            losses = [one.metrics[0] for one in found]
            kinds = Counter(one.verdict.kind for one in found)
            print(
                f"| {name} | {', '.join(f'{n} {kind}' for kind, n in kinds.items())} | "
                f"{', '.join(f'{_size(one.mean_error)}' for one in losses)} | "
                f"{', '.join(f'{_size(one.end_diff)}' for one in losses)} | "
                f"{', '.join(str(one.trend.parts_at or '-') for one in losses)} |",
                flush=True,
            )


def _size(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-4 else f"{value:.2%}"


def _run(folder: Path, name: str, how: dict[str, Any]) -> Path:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if how.pop("kernels", False):
        environ["ATEN_CPU_CAPABILITY"] = "default"
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(how)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    path = folder / f"{name}.jsonl"
    path.write_text(done.stdout)
    return path


def _train(
    *,
    seed: int,
    steps: int,
    rate: float = 1.0,
    beta: float = 0.999,
    lost: bool = False,
    doubled: bool = False,
) -> list[dict[str, Any]]:
    """Losses of a training on the words of the tiny tokenizer's own text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from divergence.experiments import tiny

    with tempfile.TemporaryDirectory() as folder:
        place = tiny.build(Path(folder) / "m", seed=seed, dtype="float32")
        model = AutoModelForCausalLM.from_pretrained(place).train()
        tokenizer = AutoTokenizer.from_pretrained(place)
    text = Path(tiny.__file__).with_name("tiny.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 * rate, betas=(0.9, beta))
    draws = torch.Generator().manual_seed(seed)
    rows = []
    for step in range(steps):
        starts = torch.randint(len(ids) - 32, (8,), generator=draws)
        batch = torch.stack([ids[s : s + 32] for s in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        if lost and step >= steps // 2:
            for one in model.model.layers[1].parameters():
                one.grad = None
        if doubled and step == steps // 2:
            for group in optimizer.param_groups:
                group["lr"] *= 2
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows.append({"step": step, "loss": float(loss), "grad_norm": float(norm)})
    return rows


if __name__ == "__main__":
    main()
