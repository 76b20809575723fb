"""A device whose kernels are wrong (``SIMULATED_NPU`` says how), two machines that look for it."""

import json
import os
from pathlib import Path

from commands import divergence, made


def answers(work, model) -> dict:
    given = os.environ["SIMULATED_NPU"]
    switches = dict([given.split("=")])
    made("capture", model, "-o", "a", "--device", "cpu", "--max-new-tokens", 2)
    made("truth", "a", "-o", "t")
    made("capture", "--like", "a", "-o", "b", "--device", "npu", "--escalate", **switches)
    found = {"compare": divergence("compare", "a", "b", "--truth", "t")}
    asked = ("localize", "a", "b", "-o", "ab", "--truth", "t")
    for device, side in (("npu", "candidate"), ("cpu", "reference"), ("npu", "candidate")):
        said = divergence(*asked, "--device", device, "--here", side, **switches)
    found["localize"] = said
    found["report"] = json.loads(
        made(*asked, "--device", "npu", "--here", "candidate", "--json", **switches).out
    )
    found["reproducer"] = sorted(path.name for path in Path("ab").glob("repro*/*"))
    return found
