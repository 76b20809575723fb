"""Which code a model runs: digests that ignore layout, and what was put in a class' place."""

import functools
import importlib
import re
import sys
import types
import warnings

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from divergence.recording.code import (
    FUNCTIONAL,
    code_notes,
    digest_of,
    innermost,
    syntax_of,
    wrappers_of,
)
from divergence.recording.engines.load import Loading, load_model

PLUGIN = '''"""A vendor's plugin."""
import functools
import torch


def forward(self, x):
    return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def around(original, scale):
    def scaled(*args, **kwargs):
        return original(*args, **kwargs) * scale

    return scaled


def wrapped(original, scale):
    return functools.wraps(original)(around(original, scale))


def silu(x, inplace=False):
    return x * torch.sigmoid(x)


def attention(module, query, key, value, mask, **kwargs):
    return query, None


def hook(module, args, output):
    return output * 1.02
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The module ``vendor_plugin``, from a file of that name."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "vendor_plugin.py").write_text(PLUGIN)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("vendor_plugin")
    sys.path.remove(str(folder))
    del sys.modules["vendor_plugin"]


@pytest.fixture
def model(llama):
    return load_model(Loading(str(llama))).module


@pytest.fixture(scope="module")
def healthy(llama):
    return code_notes(load_model(Loading(str(llama))).module)


def line_of(name: str) -> int:
    return (
        PLUGIN.splitlines().index(next(x for x in PLUGIN.splitlines() if f"def {name}(" in x)) + 1
    )


# --- what a healthy model says -----------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    ["llama", "gemma3", "gpt2", "mamba2", "mixtral", "qwen3-moe", "bert", "t5", "remote-code"],
)
def test_nothing_is_replaced_in_a_healthy_model(architecture, tiny_model):
    """Of no architecture, in no class; and two loads of it run the same code."""
    trusted = architecture == "remote-code"
    loading = Loading(str(tiny_model(architecture)), trust_remote_code=trusted)
    one, two = (code_notes(load_model(loading).module) for _ in range(2))
    assert one == two
    assert not any(n.replaced or n.wrapped or n.compiled or n.odd for n in one.values())
    assert all(note.functions["forward"] for note in one.values())
    text = repr(one)
    assert not re.search(r"/(home|root|tmp|site-packages)", text)


def test_functions_are_followed_through_the_file_and_one_level_beyond(healthy):
    """What forward calls by name, what that calls, and the origin of the class."""
    note = healthy["LlamaAttention"]
    assert {"forward", "apply_rotary_pos_emb", "rotate_half", "repeat_kv"} <= set(note.functions)
    assert note.origin == "transformers.models.llama.modeling_llama"
    assert note.places == ["model.layers.*.self_attn"]
    assert "create_causal_mask" in healthy["LlamaModel"].functions  # of another file


def test_the_attention_that_was_asked_for_is_no_other_code(model, healthy):
    """It is a setting: the function is listed, the digest is the same."""
    model.set_attn_implementation("sdpa")
    note = code_notes(model)["LlamaAttention"]
    assert "ALL_ATTENTION_FUNCTIONS[sdpa]" in note.functions
    assert note.digest == healthy["LlamaAttention"].digest
    assert note.replaced == []


# --- the digest --------------------------------------------------------------------------------

SOURCE = """
def f(x: int, y=2) -> int:
    '''Says what it does.'''
    total: float = x * y  # a comment
    return total + {number}
"""
OTHER_LAYOUT = """
# a file of another layout


def f(x, y=2):
    total = (
        x
        * y
    )

    return total + 1
"""


def read(folder, name, text):
    path = folder / f"{name}.py"
    path.write_text(text)
    space = {"__name__": name, "__file__": str(path)}
    exec(compile(text, str(path), "exec"), space)
    return digest_of(space["f"], syntax_of(space["f"]))


def test_layout_comments_and_annotations_do_not_matter(tmp_path):
    """A number does."""
    one = read(tmp_path, "one", SOURCE.format(number=1))
    assert one == read(tmp_path, "two", OTHER_LAYOUT)
    assert one != read(tmp_path, "three", SOURCE.format(number=2))


def test_numbers_held_from_outside_matter(plugin):
    """Two functions of one factory have one source and another scale."""

    def digest(scale):
        function = innermost(plugin.around(None, scale))
        return digest_of(function, syntax_of(function))

    assert digest(1.0) == digest(1.0) != digest(1.02)


def test_code_without_source_is_told_apart(model, healthy, monkeypatch):
    """Made by exec: by its byte code."""
    space = {}
    exec("def one(self, x):\n return x * 2\ndef two(self, x):\n return x * 3", space)
    digests = set()
    for name in ("one", "two"):
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", space[name])
        note = code_notes(model)["LlamaMLP"]
        assert note.replaced == ["LlamaMLP.forward was replaced by <string>:" + "13"[name == "two"]]
        digests.add(note.digest)
    assert len(digests) == 2


# --- what was replaced -------------------------------------------------------------------------


LLAMA = modeling_llama
REPLACED = {
    "class": (LLAMA.LlamaMLP, "forward", "forward", "LlamaMLP"),
    "namespace": (LLAMA, "apply_rotary_pos_emb", "rotary", "LlamaAttention"),
    "helper": (LLAMA, "repeat_kv", "silu", "LlamaAttention"),
    "eager_attention": (LLAMA, "eager_attention_forward", "attention", "LlamaAttention"),
    "torch_function": (torch.nn.functional, "silu", "silu", FUNCTIONAL),
    "torch_operator": (torch, "matmul", "silu", FUNCTIONAL),
    "layer_of_torch": (torch.nn.Linear, "forward", "forward", "Linear"),
}
"""What is replaced, by which function of the plugin, and the class that is told to have it."""


def case_instances(plugin, model, patch):
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(plugin.forward, layer.mlp)
    return "LlamaMLP", "LlamaMLP.forward", "forward"


def case_around(plugin, model, patch):
    patch.setattr(LLAMA.LlamaMLP, "forward", plugin.around(LLAMA.LlamaMLP.forward, 1.02))
    return "LlamaMLP", "LlamaMLP.forward", "scaled"


def case_wrapped(plugin, model, patch):
    patch.setattr(LLAMA.LlamaMLP, "forward", plugin.wrapped(LLAMA.LlamaMLP.forward, 1.02))
    return "LlamaMLP", "LlamaMLP.forward", "scaled"


def case_wrapped_under_decorators(plugin, model, patch):
    rotary = LLAMA.LlamaRotaryEmbedding
    patch.setattr(rotary, "forward", plugin.wrapped(rotary.forward, 1.02))
    return rotary.__name__, f"{rotary.__name__}.forward", "scaled"


def case_registered_attention(plugin, model, patch):
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", plugin.attention)
    model.set_attn_implementation("sdpa")
    return "LlamaAttention", "ALL_ATTENTION_FUNCTIONS[sdpa]", "attention"


CASES = {name[5:]: value for name, value in list(globals().items()) if name.startswith("case_")}


@pytest.mark.parametrize("case", [*REPLACED, *CASES])
def test_what_was_put_in_place_is_named(case, plugin, model, healthy, monkeypatch):
    """By class, function, file and line; and the digest is another."""
    if case in REPLACED:
        owner, attribute, function, name = REPLACED[case]
        monkeypatch.setattr(owner, attribute, getattr(plugin, function))
        place = owner.__name__.removeprefix("transformers.models.llama.")
        what = f"{place}.{attribute}"
    else:
        name, what, function = CASES[case](plugin, model, monkeypatch)
    note = code_notes(model)[name]
    assert note.replaced == [f"{what} was replaced by vendor_plugin.py:{line_of(function)}"]
    assert name not in healthy or note.digest != healthy[name].digest


def hide_in_instance(plugin, model, patch):
    mlp = model.model.layers[1].mlp
    mlp.forward = plugin.wrapped(mlp.forward, 1.02)
    return "LlamaMLP"


def hide_in_whole_model(plugin, model, patch):
    model.forward = plugin.wrapped(plugin.wrapped(model.forward, 1.0), 1.02)
    return "LlamaForCausalLM"


def hide_in_bound_argument(plugin, model, patch):
    norm = model.model.norm
    norm.forward = functools.partial(norm.forward, eps=1e-3)
    return "LlamaRMSNorm"


def hide_in_argument_of_function(plugin, model, patch):
    rotary = functools.partial(modeling_llama.apply_rotary_pos_emb, unsqueeze_dim=2)
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
    return "LlamaAttention"


def hide_in_compiled_function(plugin, model, patch):
    rotate = torch.compile(modeling_llama.rotate_half, backend="eager")
    patch.setattr(modeling_llama, "rotate_half", rotate)
    return "LlamaAttention"


def hide_in_proxy(plugin, model, patch):
    original = modeling_llama.repeat_kv

    class Proxy:
        """Passes for a function, as wrapt's do."""

        __class__ = property(lambda self: types.FunctionType)
        __wrapped__ = original
        __code__ = original.__code__

        def __call__(self, *args):
            return original(*args) * 1.02

    patch.setattr(modeling_llama, "repeat_kv", Proxy())
    return "LlamaAttention"


HIDDEN = [value for name, value in list(globals().items()) if name.startswith("hide_")]


@pytest.mark.parametrize("hide", HIDDEN, ids=lambda hide: hide.__name__[5:])
def test_what_hides_behind_the_original_is_seen(hide, plugin, model, healthy, monkeypatch):
    """A wrapper that says what it wraps is no less other code."""
    name = hide(plugin, model, monkeypatch)
    note = code_notes(model)[name]
    assert note.digest != healthy[name].digest or note.odd


def test_a_forward_that_is_bound_once_more_is_the_same(model, healthy):
    """Libraries do so; nothing else runs."""
    for module in [layer.mlp for layer in model.model.layers] + [model.model.norm]:
        module.forward = functools.partial(type(module).forward, module)
    assert code_notes(model) == healthy


def test_one_instance_is_named_by_its_path(plugin, model, healthy):
    """The other modules of the class keep their digest."""
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(plugin.forward, mlp)
    note = code_notes(model)["LlamaMLP"]
    assert note.digest == healthy["LlamaMLP"].digest
    assert list(note.odd) == ["model.layers.1.mlp"]
    assert note.replaced[0].endswith("in model.layers.1.mlp")


def test_a_hook_is_named(plugin, model, healthy):
    """It may change what passes."""
    model.model.layers[1].mlp.register_forward_hook(plugin.hook)
    note = code_notes(model)["LlamaMLP"]
    assert note.wrapped == [f"forward hook vendor_plugin.py:{line_of('hook')} (1 of 3)"]
    assert list(note.odd) == ["model.layers.1.mlp"]


def test_a_class_of_the_same_name_is_told_apart(model):
    """By its Python module, with a dot before the name."""

    class LlamaMLP(torch.nn.Module):
        def forward(self, x):
            return x

    model.extra = LlamaMLP()
    notes = code_notes(model)
    assert "LlamaMLP" not in notes
    assert {name for name in notes if name.endswith(".LlamaMLP")} == {
        "transformers.models.llama.modeling_llama.LlamaMLP",
        f"{__name__}.LlamaMLP",
    }


# --- what stands around a module ---------------------------------------------------------------


class LoraLinear(torch.nn.Module):
    """As PEFT's layers look from outside."""

    active_adapters = ("style",)
    disable_adapters = False

    def __init__(self, base, merged):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({"style": torch.nn.Linear(2, 2)})
        self.merged = merged
        self.scaling = {"style": 2.0}

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.parametrize(("merged", "said"), [(False, "not merged"), (True, "merged")])
def test_adapters_are_named(merged, said):
    """Which, by which factor, and are they merged into the weight."""
    (text,) = wrappers_of(LoraLinear(torch.nn.Linear(2, 2), merged))
    assert text == f"LoRA style times 2.0, {said}"


def test_quantised_layers_and_offloading_are_named(model, healthy):
    """By the package of the class; by the hook that accelerate leaves, whose forward is the own."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    kind = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    assert wrappers_of(kind(2, 2)) == ["quantised by bitsandbytes"]
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook(execution_device="cpu"))
    note = code_notes(model)["LlamaMLP"]
    assert note.wrapped == ["accelerate: AlignDevicesHook (1 of 3)"]
    assert note.digest == healthy["LlamaMLP"].digest
    assert (note.replaced, note.odd) == ([], {})


def test_weights_that_are_computed_are_named(model):
    """A parametrisation computes a weight whenever it is used."""
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.down_proj)
    assert code_notes(model)["Linear"].wrapped == ["parametrised: weight (1 of 22)"]


# --- below the classes -------------------------------------------------------------------------


def test_a_kernel_that_was_registered_anew_is_named(model):
    """Through torch.library: the operator, its dispatch key, and by whom."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("silu", lambda x: x * torch.sigmoid(x), "CPU")
    try:
        (text,) = code_notes(model)[FUNCTIONAL].replaced
    finally:
        library._destroy()
    assert text.startswith("the CPU kernel of aten.silu was replaced by test_code.py:")
    assert FUNCTIONAL not in code_notes(model)


def test_plain_numbers_of_modules_are_recorded(model, healthy):
    """A scale or an epsilon that somebody changed, in all modules or in one."""
    assert healthy["LlamaAttention"].attributes["scaling"] == "0.25"
    assert "layer_idx" not in healthy["LlamaAttention"].attributes
    assert "in_features" not in healthy["Linear"].attributes
    model.model.layers[1].self_attn.scaling = 0.26
    odd = code_notes(model)["LlamaAttention"].attributes["scaling"]
    assert odd.value == "0.25"
    assert odd.others == {"0.26": ["model.layers.1.self_attn"]}
