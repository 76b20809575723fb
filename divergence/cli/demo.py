"""`divergence demo`: the whole job on one machine, offline, in a minute.

Three captures of one small random model: on this CPU's own kernels, on genuinely
other kernels of the same CPU (a second process under other instruction sets), and
there again with a planted fault; and the first of them in float64, which is the truth.
The first pair must not alarm, the second must name the planted block and the guilty side, and
the descent from there the operator that the fault comes in at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from divergence.errors import FaultError, RunError
from divergence.options.option import Option
from divergence.options.shared import Quiet, Verbose
from divergence.run.untrusted.command import quoted_words

__all__ = ["EPILOG", "OTHER_KERNELS", "command"]

EPILOG = """
Examples:

  divergence demo

  divergence demo --workdir /tmp/demo   # keeps the model and the runs there
"""

OTHER_KERNELS = {
    # torch's own kernels without vector instructions, oneDNN and MKL on their oldest paths:
    # other orders of addition, other polynomials, no fused multiply-add.
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}
FAULT = "model.layers.6.mlp.down_proj:out=scale:1.10"
BLOCK = "model.layers.6"
MODULE = "model.layers.6.mlp.down_proj"
PROMPT = "The quick brown fox jumps over the lazy dog. Rounding error is the difference between"


def command(
    workdir: Annotated[
        Path | None, Option("--workdir DIR", "Where model and runs go. Default: the user's cache.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the whole job offline: capture, repeat elsewhere, compare, find a planted fault."""
    root = _folder(workdir)
    model = root / "model"
    if not (model / "config.json").is_file():
        from divergence.recording.engines.tiny import build

        build("llama", model, size="demo")
    _say(f"model: 12 Llama blocks, bfloat16, random weights, in {model}\n")
    a, b, c, truth = (root / name for name in ("here", "other-kernels", "fault", "truth"))
    first = ["capture", str(model), "-o", str(a), "--prompt", PROMPT, "--chat", "--device", "cpu"]
    _run([*first, "--label", "this CPU", "--force"], {}, "1. capture on this CPU's own kernels")
    replay = ["capture", "--like", str(a), "--device", "cpu", "--force"]
    _run([*replay, "-o", str(b), "--label", "other kernels"], OTHER_KERNELS,
         "2. the same on other kernels, standing in for another machine")  # fmt: skip
    _run([*replay, "-o", str(c), "--label", "other kernels, faulty", "--plant", FAULT],
         OTHER_KERNELS, "3. there again, with a fault planted in block 6")  # fmt: skip
    _run(["truth", str(a), "-o", str(truth), "--force"], {},
         "4. the first run in float64: what is right, and how wide rounding is")  # fmt: skip
    healthy = _compare(a, b, truth, "5. two healthy machines: this must not alarm", quiet=quiet)
    faulty = _compare(a, c, truth, "6. a faulty one: this must name block 6 and the side",
                      quiet=quiet)  # fmt: skip
    _check(healthy, faulty)
    found = _localize(a, c, truth, root / "localized",
                      "7. from the block to the operator, and the proof", quiet=quiet)  # fmt: skip
    _check_operator(found)
    _say("\nNow with a model of your own, on two machines:\n"
         "  divergence capture MODEL -o a\n"
         "  divergence capture --like a -o b\n"
         "  divergence truth a -o truth\n"
         "  divergence compare a b --truth truth")  # fmt: skip


def _folder(workdir: Path | None) -> Path:
    if workdir is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        workdir = Path(cache) / "divergence" / "demo"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{workdir} cannot be written: {error.strerror}", hint="choose another --workdir"
        ) from error
    return workdir


def _say(text: str) -> None:
    from divergence.report.terminal import write_text

    write_text(text + "\n")


def _run(arguments: list[str], variables: dict[str, str], title: str) -> None:
    """One `divergence` command in a process of its own, shown as a user would type it."""
    shown = [f"{name}={value}" for name, value in variables.items()]
    _say(f"{title}\n   $ {' '.join([*shown, quoted_words(['divergence', *arguments])])}")
    package = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join(
            [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    sys.stdout.flush()
    done = subprocess.run(
        [sys.executable, "-m", "divergence", *arguments, "--quiet"],
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise FaultError(
            f"the demo's capture ended with exit code {done.returncode}",
            where=quoted_words(arguments),
        )


def _compare(a: Path, b: Path, truth: Path, title: str, *, quiet: bool):
    from divergence.cli.compare import show_report
    from divergence.comparison.api import compare

    words = ["divergence", "compare", str(a), str(b), "--truth", str(truth)]
    _say(f"\n{title}\n   $ {quoted_words(words)}\n")
    report = compare(a, b, truth=truth)
    show_report(report, quiet=quiet, verbose=False)
    return report


def _localize(a: Path, b: Path, truth: Path, out: Path, title: str, *, quiet: bool):
    from divergence.experiments.localize import localize
    from divergence.report.localization import localization_lines
    from divergence.report.terminal import print_lines

    words = ["divergence", "localize", str(a), str(b), "--truth", str(truth), "-o", str(out),
             "--force"]  # fmt: skip
    _say(f"\n{title}\n   $ {quoted_words(words)}\n")
    result = localize(a, b, truth=truth, out=out, device="cpu", force=True)
    print_lines(localization_lines(result, answer_only=quiet))
    return result


def _check_operator(result) -> None:
    """The fault is an operator more than the reference has, behind the planted module."""
    fed = [] if result.operator is None else result.operator.fed_by
    proven = result.causal is not None and result.causal.holds
    if not proven or not any(site.startswith(f"{MODULE}/") for site in fed):
        raise FaultError(
            f"the fault in {MODULE} was followed to {result.operator and result.operator.site}, "
            f"fed by {fed}, proven: {proven}",
            hint="please report this with the output of `divergence env`",
        )


def _check(healthy, faulty) -> None:
    """The demo's own promise."""
    if healthy.verdict.kind not in ("identical", "within_floor"):
        raise FaultError(
            f"the healthy pair was judged {healthy.verdict.kind}",
            hint="please report this with the output of `divergence env`",
        )
    verdict, onset = faulty.verdict, faulty.verdict.onset
    found = verdict.kind == "localized" and onset is not None and onset.block == BLOCK
    if not found or verdict.side != "candidate":
        raise FaultError(
            f"the fault in {BLOCK} was judged {verdict.kind} at {onset}, side {verdict.side}",
            hint="please report this with the output of `divergence env`",
        )
