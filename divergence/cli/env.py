"""`divergence env`: this machine, as a run would record it."""

from __future__ import annotations

from divergence.cli.shell.options import show
from divergence.options.shared import Device, Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence env

  divergence env --json > machine.json
"""


def command(
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show this machine as a run records it: device, CPU, versions and variables.

    No host name, no user and no file path; variables by an allow-list.
    """
    import msgspec

    from divergence.layout.terminal import print_lines
    from divergence.recording.machine.environment import collect_environment
    from divergence.report.environment import environment_lines
    from divergence.report.machine import strict_json

    environment = collect_environment(device)
    if json:
        show(strict_json({"schema_version": 1, "environment": msgspec.to_builtins(environment)}))
    else:
        lines = environment_lines(environment)
        print_lines(lines[:2] if quiet else lines)
