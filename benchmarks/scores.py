"""A trained model under lm-evaluation-harness on this CPU: healthy pairs, eight bits, faults.

    python benchmarks/scores.py --lm-eval PYTHON [--results DIR]

PYTHON is an interpreter that has lm-eval (0.4.13 was tried) beside torch and transformers.
SmolLM2-135M (benchmarks/_trained.py) answers the 794 questions of benchmarks/_scores_task.py in
each setting, and `divergence.scores` holds each pair together, the ways of asking one fact as a
cluster. Results that lie in DIR already are not made again. bfloat16 takes some five minutes a
setting where the CPU has no such instructions, float32 half a minute. Then it goes from the score
of one fault to its layer, and from one of a healthy pair to its near ties, by the commands that it
prints with what they answer; `--plant` makes this machine the faulty one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from _scores_task import write_task
from _trained import checkpoint

import divergence

OLD = {"ATEN_CPU_CAPABILITY": "default"}
SETTINGS: dict[str, tuple[list[str], dict[str, str]]] = {
    "float32": (["--dtype", "float32"], {}),
    "float32, old kernels": (["--dtype", "float32"], OLD),
    "bfloat16": (["--dtype", "bfloat16"], {}),
    "bfloat16, old kernels": (["--dtype", "bfloat16"], OLD),
    "bfloat16, int8 weights": (["--dtype", "bfloat16", "--int8"], {}),
    "bfloat16, fault mlp-half": (["--dtype", "bfloat16", "--fault", "mlp-half"], {}),
    "float32, fault gate-sign": (["--dtype", "float32", "--fault", "gate-sign"], {}),
    "bfloat16, fault gate-sign": (["--dtype", "bfloat16", "--fault", "gate-sign"], {}),
}
PAIRS = (
    ("float32", "float32, old kernels"),
    ("bfloat16", "bfloat16, old kernels"),
    ("float32", "bfloat16"),
    ("float32", "bfloat16, old kernels"),
    ("bfloat16", "bfloat16, int8 weights"),
    ("bfloat16", "bfloat16, fault mlp-half"),
    ("float32", "float32, fault gate-sign"),
    ("bfloat16", "bfloat16, fault gate-sign"),
    ("bfloat16", "float32, fault gate-sign"),
)
Commands = tuple[tuple[str, dict[str, str]], ...]
"""Each with its variables."""
FAULT = "float32", "float32, fault gate-sign"
TO_THE_LAYER: Commands = (
    ("scores gpu npu --cluster fact --capture ./model --dtype float32 -o flips", {}),
    ("capture --like flips -o flips-b --plant model.layers.5.mlp.gate_proj:out=scale:-1", {}),
    ("compare flips flips-b", {}),
    ("scores gpu npu --cluster fact --runs flips flips-b", {}),
)
HEALTHY = "bfloat16", "bfloat16, old kernels"
TO_THE_TIES: Commands = (
    ("scores new old --cluster fact --capture ./model -o ties --num-prompts 16 -q", {}),
    ("capture --like ties -o ties-b -q", OLD),
    ("scores new old --cluster fact --runs ties ties-b", {}),
)
DTYPES = "float32", "bfloat16"
"""In place of ``HEALTHY`` where a CPU has bfloat16 units, which the switch does not turn off: there
no score flips."""
BETWEEN_DTYPES: Commands = (
    (
        "scores new old --cluster fact --capture ./model --dtype float32 -o ties"
        " --num-prompts 16 -q",
        {},
    ),
    ("capture --like ties -o ties-b --dtype bfloat16 -q", {}),
    ("scores new old --cluster fact --runs ties ties-b", {}),
)


def evaluated(name: str, results: Path, python: str | None) -> Path:
    """The folder of one setting's results."""
    folder = results / name.replace(", ", "-").replace(" ", "-")
    if any(folder.rglob("samples_*.jsonl")):
        return folder
    if python is None:
        raise SystemExit(f"{folder} holds no results: --lm-eval PYTHON makes them")
    task = results / "task"
    write_task(task)
    words, variables = SETTINGS[name]
    script = Path(__file__).with_name("_scores_eval.py").resolve()
    subprocess.run(
        [python, str(script), str(checkpoint("bfloat16")), str(folder.resolve()), *words],
        cwd=task,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        check=True,
    )
    return folder


def case(
    results: Path, settings: tuple[str, str], names: tuple[str, str], commands: Commands
) -> None:
    """From a score to runs."""
    folder = results / "-".join(names)
    shutil.rmtree(folder, ignore_errors=True)
    for name, setting in zip(names, settings, strict=True):
        shutil.copytree(evaluated(setting, results, None), folder / name)
    (folder / "model").symlink_to(checkpoint("bfloat16"))
    for words, variables in commands:
        print(f"\n$ divergence {words}", flush=True)
        command = [sys.executable, "-m", "divergence", *shlex.split(words)]
        subprocess.run(command, cwd=folder, env={**os.environ, **variables}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", help="a Python that has lm-eval")
    parser.add_argument("--results", type=Path, default=Path("scores-results"))
    given = parser.parse_args()
    titles = ("A", "B", "A's score", "B's", "95% of the difference", "lost, gained", "ties", "3%")
    for row in (titles, ("---",) * len(titles)):
        print(f"| {' | '.join(row)} |")
    flips = {}
    for a, b in PAIRS:
        folders = [evaluated(name, given.results, given.lm_eval) for name in (a, b)]
        report = divergence.scores(folders[0], folders[1], cluster="fact")
        (task,) = report.candidates[0].tasks
        causes, verdict = task.causes, str(task.verdict)
        flips[a, b] = task.num_lost + task.num_gained
        ties = "-" if causes is None else f"{causes.num_ties} of {flips[a, b]}"
        if verdict == "undecided":
            verdict += f", {task.bands[0].needed:,} needed"
        cells = (
            a,
            b,
            f"{task.reference:.3f}",
            f"{task.candidate:.3f}",
            f"{task.low:+.4f} to {task.high:+.4f}",
            f"{task.num_lost}, {task.num_gained}",
            ties,
            verdict,
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    case(given.results, FAULT, ("gpu", "npu"), TO_THE_LAYER)
    ties = (HEALTHY, TO_THE_TIES) if flips[HEALTHY] else (DTYPES, BETWEEN_DTYPES)
    case(given.results, ties[0], ("new", "old"), ties[1])


if __name__ == "__main__":
    main()
