"""What the commands that make a run say when they are done."""

from __future__ import annotations

import os
from typing import Any

from divergence.cli.shell.options import show

__all__ = ["show_copy", "show_plan", "show_run"]


def show_plan(plan: Any, *, json: bool) -> None:
    import msgspec

    from divergence.layout.terminal import print_lines
    from divergence.report.capturing import plan_lines
    from divergence.report.machine import strict_json

    built = msgspec.to_builtins(plan)
    if json:
        show(strict_json({"schema_version": 1, "dry_run": built}))
    else:
        print_lines(plan_lines(built))


def show_run(run: Any, *, like: str | None, json: bool, quiet: bool) -> None:
    if run.manifest.mesh is not None and os.environ.get("RANK", "0") != "0":
        return  # the first rank speaks for all
    from divergence.layout.terminal import print_lines
    from divergence.report.capturing import captured_lines

    if json or quiet:
        _show_briefly(run, json=json)
    else:
        print_lines(captured_lines(str(run.path), run.manifest, run.records, like=like))


def show_copy(what: str, run: Any, *, json: bool, quiet: bool) -> None:
    from divergence.layout.terminal import print_lines
    from divergence.report.capturing import copied_lines

    if json or quiet:
        _show_briefly(run, json=json)
    else:
        print_lines(copied_lines(what, str(run.path), run.manifest, run.records))


def _show_briefly(run: Any, *, json: bool) -> None:
    import msgspec

    from divergence.report.machine import strict_json

    if json:
        manifest = msgspec.to_builtins(run.manifest)
        show(strict_json({"schema_version": 1, "path": str(run.path), "manifest": manifest}))
    else:
        show(str(run.path))
