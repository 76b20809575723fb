"""``python -m divergence`` and the console script: the command line, from an installed wheel or a
bare checkout.

Whatever happens, also while modules are imported and while an error is being told: it does not end
with 1, which is an answer (Python's own code for what nobody caught), or with 120 (Python's for an
answer that could not be written).
"""

import contextlib
import os
import sys

from divergence.cli.garbage import hold
from divergence.cli.streams import FAULT_CODE, interrupted, nowhere, stop_code, unwatch, watch
from divergence.errors import FaultError, exhausted


def run() -> None:
    """The command line. Ctrl-C ends it with 130, also while its modules are imported."""
    watch()
    hold()
    code: object = FAULT_CODE
    is_loaded = False
    try:
        try:
            from divergence.cli.main import run as command_line

            is_loaded = True
            command_line()
            code = 0
        except SystemExit as ended:
            code = ended.code if is_loaded else FAULT_CODE
        except BaseException as error:
            code = stop_code() if _stopped(error) else FAULT_CODE
            text = f"error: {exhausted(error) or FaultError(repr(error)[:500])}"
            text = "interrupted" if _stopped(error) else text
            os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
        unwatch()
    except BaseException as error:  # another one meanwhile
        code = stop_code() if _stopped(error) else FAULT_CODE
        unwatch()
    try:
        sys.stdout.flush()
    except BaseException:
        with contextlib.suppress(BaseException):
            nowhere()
        code = code or 2
    sys.exit(code)


def _stopped(error: BaseException) -> bool:
    return interrupted() or isinstance(error, KeyboardInterrupt)


if __name__ == "__main__":
    run()
