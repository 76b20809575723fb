"""``python -m divergence`` and the console script: the command line, from an installed wheel or a
bare checkout."""

import sys

from divergence.cli.streams import INTERRUPTED_CODE, watch


def run() -> None:
    """The command line. Ctrl-C ends it with 130, also while its modules are imported."""
    watch()
    try:
        from divergence.cli.main import run as command_line

        command_line()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED_CODE)


if __name__ == "__main__":
    run()
