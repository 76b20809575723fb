"""What ranks do with gradients, seen without ranks: stages of ZeRO, sums. (Steps: test_ranks.)"""

from types import SimpleNamespace

import pytest
import torch

from divergence.domains.training.recording.optimizer import Stepping, check_reduced
from divergence.domains.training.recording.options import check_stage
from divergence.errors import ModelError, UsageError
from divergence.options.commands import CaptureOptions
from divergence.run.manifest import Training


@pytest.mark.parametrize(("stage", "axis"), [(0, "dp"), (1, "dp"), (2, "fsdp"), (3, "fsdp")])
def test_each_stage_has_its_mesh(stage, axis):
    """A stage with another mesh is refused, with the one that it takes."""
    options = CaptureOptions(train=True, zero=stage, optimizer="adamw")
    check_stage(options, [axis])
    other = "fsdp" if axis == "dp" else "dp"
    with pytest.raises(UsageError, match=f"--zero {stage} with --mesh {other}") as told:
        check_stage(options, [other])
    assert told.value.hint == f"--mesh {axis}"


def test_a_stage_without_ranks_or_a_step():
    """Each thing that a stage needs is named where it is missing."""
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


def test_a_parameter_without_a_gradient_on_any_rank_has_none(monkeypatch):
    """Zeros would be decayed by the optimizer; one that this rank alone lacks is added up."""
    used, lacking, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    used.grad = torch.ones(2)
    ranks = SimpleNamespace(
        sizes={"dp": 2}, dealt=True, gather=lambda here: [here, [True, True, False]]
    )
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: gradient.add_(1.0))
    named = [("", name, one) for name, one in (("a", used), ("b", lacking), ("c", frozen))]
    held = [holder.grad for *_, holder in Stepping(Training(train=True), ranks).reduce(named)]
    assert held[0].tolist() == [2.0, 2.0] and held[1].tolist() == [1.0, 1.0]
    assert held[2] is None
