"""Stages of ZeRO: which go with which mesh, and the optimizer of the first. (Steps: test_ranks.)"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from divergence.errors import ModelError, UsageError
from divergence.options.capture import CaptureOptions
from divergence.recording.training.zero import check_reduced, check_stage


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


def test_gradients_that_fsdp_left_as_they_were_are_no_sums():
    """A rank's own gradient is not recorded as that of all."""
    ranks = SimpleNamespace(sizes={"fsdp": 2})
    parameter = torch.nn.Parameter(torch.ones(2))
    check_reduced([parameter], ranks)
    parameter.grad = torch.ones(2)
    check_reduced([parameter], SimpleNamespace(sizes={"dp": 2}))
    with pytest.raises(ModelError, match="1 of 1 parameters' gradients"):
        check_reduced([parameter], ranks)
