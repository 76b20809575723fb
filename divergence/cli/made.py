"""What the commands that make a run say when they are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from divergence.cli.options import show

__all__ = ["show_plan", "show_run"]


def show_plan(plan: Any, *, json: bool) -> None:
    import msgspec

    from divergence.report.capturing import plan_lines
    from divergence.report.machine import strict_json
    from divergence.report.terminal import print_lines

    built = msgspec.to_builtins(plan)
    if json:
        show(strict_json({"schema_version": 1, "dry_run": built}))
    else:
        print_lines(plan_lines(built))


def show_run(run: Any, *, like: Path | None, json: bool, quiet: bool) -> None:
    import msgspec

    from divergence.report.capturing import captured_lines
    from divergence.report.machine import strict_json
    from divergence.report.terminal import print_lines

    if json:
        manifest = msgspec.to_builtins(run.manifest)
        show(strict_json({"schema_version": 1, "path": str(run.path), "manifest": manifest}))
    elif quiet:
        show(str(run.path))
    else:
        print_lines(captured_lines(str(run.path), run.manifest, run.records, like=like))
