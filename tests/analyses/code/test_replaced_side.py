"""Code that was put on instances of a class on one side: the side is named, whoever is the odd."""

import types

import pytest
import torch


@pytest.fixture
def pair(shared_run, shared_truth):
    """(the run, its truth)."""
    prompts = ["one two three four five six seven eight"]
    model = {"dtype": "float32", "num_blocks": 4}
    a = shared_run(model=model, prompts=prompts, max_new_tokens=2, probe=False)
    return a, shared_truth(a)


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
def test_the_side_is_told_however_many_are_replaced(pair, case, answer):
    """What stays as it was is no replacement, be it most instances of the class or one."""
    a, true = pair
    verdict = answer(a, replaced(*CASES[case]), truth=true).verdict
    assert (verdict.side, verdict.confidence) == ("candidate", "high")


class Scaled(torch.nn.Linear):
    """Stands in for a Linear, as a fused or a quantised one does."""

    def forward(self, x):
        return super().forward(x) * 1.1


def scaled(module, x):
    return torch.nn.functional.linear(x, module.weight) * 1.1


def by_hook(model, name, module):
    module.register_forward_hook(lambda module, args, result: result * 1.1)


def by_method(model, name, module):
    module.forward = types.MethodType(scaled, module)


def by_class(model, name, module):
    module.__class__ = Scaled


def by_another_module(model, name, module):
    other = Scaled(module.in_features, module.out_features, bias=False)
    other.weight = module.weight
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, other)


CHOSEN = {
    "most": lambda name: name != "lm_head",
    "few": lambda name: name.endswith("layers.2.mlp.down_proj"),
    "all": lambda name: True,
}


@pytest.mark.parametrize("how", [by_hook, by_method, by_class, by_another_module])
@pytest.mark.parametrize("chosen", CHOSEN)
def test_the_side_is_told_however_they_are_replaced(how, chosen, pair, answer):
    """By a hook, a method, a class or a module, on few, most or all instances."""
    a, true = pair

    def prepare(model):
        for name, module in list(model.named_modules()):
            if type(module) is torch.nn.Linear and CHOSEN[chosen](name):
                how(model, name, module)

    verdict = answer(a, prepare, truth=true).verdict
    assert (verdict.side, verdict.confidence) == ("candidate", "high")
