"""Code that was put on instances of a class on one side: the side is named, whoever is the odd."""

from __future__ import annotations

import pytest

from divergence.comparison.api import compare
from divergence.recording.api import capture, truth


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    """(the run, its truth)."""
    folder = tmp_path_factory.mktemp("replaced")
    model = str(tiny_model("llama", dtype="float32", num_blocks=4))
    a = capture(model, out=folder / "a", prompts=["one two three four five six seven eight"],
                max_new_tokens=2, probe=False)  # fmt: skip
    return a, truth(a, out=folder / "truth")


def replaced(kind, chosen, factor=lambda name: 1.1):
    """A ``prepare`` that puts another forward on the instances of ``kind`` that are chosen."""

    def prepare(model):
        for name, module in model.named_modules():
            if type(module).__name__ == kind and chosen(name):
                own, by = module.forward, factor(name)
                if by == 1.1:
                    module.forward = lambda x, own=own: own(x) * 1.1
                else:
                    module.forward = lambda x, own=own, by=by: by * own(x)

    return prepare


CASES = {
    "all Linears but one": ("Linear", lambda name: name != "lm_head", lambda name: 1.1),
    "all norms but the last": ("LlamaRMSNorm", lambda name: name != "model.norm", lambda name: 1.1),
    "all but one block": ("LlamaMLP", lambda name: ".3." not in name, lambda name: 1.1),
    "half of them": ("LlamaMLP", lambda name: ".0." in name or ".1." in name, lambda name: 1.1),
    "by two codes": ("Linear", lambda name: True, lambda name: 1.2 if ".3." in name else 1.1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_side_is_told_however_many_are_replaced(pair, tmp_path, case):
    """What stays as it was is no replacement, be it most instances of the class or one."""
    a, true = pair
    b = capture(like=a, out=tmp_path / "b", prepare=replaced(*CASES[case]), probe=False)
    verdict = compare(a, b, truth=true).verdict
    assert (verdict.side, verdict.confidence) == ("candidate", "high")
