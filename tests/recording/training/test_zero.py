"""Stages of ZeRO: which go with which mesh, and the optimizer of the first. (Steps: test_ranks.)"""

from __future__ import annotations

import pytest

from divergence.errors import UsageError
from divergence.options.capture import CaptureOptions
from divergence.recording.training.zero import check_stage


@pytest.mark.parametrize(("stage", "axis"), [(0, "dp"), (1, "dp"), (2, "fsdp"), (3, "fsdp")])
def test_each_stage_has_its_mesh(stage, axis):
    options = CaptureOptions(train=True, zero=stage, optimizer="adamw")
    check_stage(options, [axis])
    other = "fsdp" if axis == "dp" else "dp"
    with pytest.raises(UsageError, match=f"--zero {stage} with --mesh {other}") as told:
        check_stage(options, [other])
    assert told.value.hint == f"--mesh {axis}"


def test_a_stage_without_ranks_or_a_step():
    with pytest.raises(UsageError, match="no ranks to divide over") as told:
        check_stage(CaptureOptions(train=True, zero=2), [])
    assert "--mesh fsdp" in told.value.hint
    with pytest.raises(UsageError, match="no stage"):
        check_stage(CaptureOptions(train=True, zero=4), ["fsdp"])
    with pytest.raises(UsageError, match="no step is made"):
        check_stage(CaptureOptions(train=True, zero=1), ["dp"])
    check_stage(CaptureOptions(train=True, zero=0), [])
