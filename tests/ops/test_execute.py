"""One operator run again: what is handled, what is refused and why."""

import math

import pytest
import torch

from divergence.ops.allowed import Refusal
from divergence.ops.replay import RANDOM, UNINITIALISED, execute_ports
from divergence.run.record import Call, Operand

T = {"tensor": 0}
X = (torch.arange(12.0).reshape(3, 4) - 5.5) / 4


def call(operator: str, tensors: list[torch.Tensor], /, note: str | None = None, **arguments):
    operands = tuple(
        Operand(
            site=f"a:in.{number}",
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            stride=None if tensor.is_contiguous() else tensor.stride(),
        )
        for number, tensor in enumerate(tensors)
    )
    return Call(operator=operator, arguments=arguments, operands=operands, note=note)


def run(operator: str, tensors: list[torch.Tensor], /, wide: bool = False, **arguments):
    values = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    before = [value.clone() for value in values]
    found = execute_ports(
        call(operator, tensors, **arguments),
        values,
        device="cpu",
        compute_dtype=torch.float64 if wide else None,
    )
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True)), "operands changed"
    return tuple(found.values())


def refused(operator: str, tensors: list[torch.Tensor] = (), /, wide: bool = False, **arguments):
    with pytest.raises(Refusal) as caught:
        run(operator, list(tensors), wide=wide, **arguments)
    return str(caught.value)


def test_a_matrix_product_with_a_transposed_operand():
    """The operand is laid out as it was; the result is contiguous."""
    weight = torch.randn(5, 4)
    (found,) = run("aten.mm.default", [X, weight.t()], self=T, mat2={"tensor": 1})
    assert torch.equal(found, X @ weight.t())
    (wide,) = run("aten.mm.default", [X, weight.t()], wide=True, self=T, mat2={"tensor": 1})
    torch.testing.assert_close(wide, X.double() @ weight.double().t(), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    ("operator", "arguments", "wanted"),
    [
        ("aten.add_.Scalar", {"other": 1}, X + 1),
        (
            "aten.masked_fill_.Scalar",
            {"mask": {"tensor": 1}, "value": {"float": "-inf"}},
            X.masked_fill(X > 0, -math.inf),
        ),
        ("aten.copy_.default", {"src": {"tensor": 2}}, torch.zeros(3, 4)),
        (
            "aten.index_put_.default",
            {"indices": [None, {"tensor": 3}], "values": {"tensor": 4}},
            X.index_put((torch.arange(3)[:, None], torch.tensor([0, 2])), torch.tensor(7.0)),
        ),
    ],
    ids=["add_", "masked_fill_", "copy_", "index_put_"],
)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_in_place(operator, arguments, wanted, wide):
    """It writes into its own copy; what was written is the result, unrounded in float64."""
    tensors = [X, X > 0, torch.zeros(3, 4), torch.tensor([0, 2]), torch.tensor(7.0)]
    (found,) = run(operator, tensors, wide=wide, self=T, **arguments)
    assert found.dtype == (torch.float64 if wide else torch.float32)
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=0)


def test_in_place_in_float64_is_not_rounded():
    """A third stays a third."""
    (found,) = run("aten.div_.Scalar", [torch.ones(2)], wide=True, self=T, other=3)
    assert torch.equal(found, torch.ones(2, dtype=torch.float64) / 3)


def test_out_overloads():
    """The result lies in a copy of the tensor that was given to hold it."""
    (found,) = run(
        "aten.add.out",
        [X, X, torch.empty(3, 4).zero_()],
        self=T,
        other={"tensor": 1},
        out={"tensor": 2},
    )
    assert torch.equal(found, X + X)


def test_operators_that_only_write():
    """A foreach operator returns nothing: its results are what it wrote."""
    found = run("aten._foreach_mul_.Scalar", [X, X + 1], self=[T, {"tensor": 1}], scalar=2)
    assert [torch.equal(a, b) for a, b in zip(found, (X * 2, (X + 1) * 2), strict=True)] == [
        True
    ] * 2


def test_data_dependent_shapes():
    """They come out as the data says."""
    (places,) = run("aten.nonzero.default", [X > 0], self=T)
    assert torch.equal(places, (X > 0).nonzero())
    (chosen,) = run("aten.masked_select.default", [X, X > 0], wide=True, self=T, mask={"tensor": 1})
    assert torch.equal(chosen, X.double()[X > 0])


def test_optional_tensors_in_lists():
    """``x[:, index]`` has a None before its index."""
    index = torch.tensor([2, 0])
    (found,) = run("aten.index.Tensor", [X, index], self=T, indices=[None, {"tensor": 1}])
    assert torch.equal(found, X[:, index])


def test_complex():
    """complex64 goes through, and is complex128 in float64."""
    z = torch.complex(X, X.flip(0))
    (found,) = run("aten.mul.Tensor", [z, z], self=T, other={"tensor": 1})
    assert torch.equal(found, z * z)
    (wide,) = run("aten.mul.Tensor", [z, z], wide=True, self=T, other={"tensor": 1})
    assert wide.dtype == torch.complex128
    (scaled,) = run("aten.mul.Scalar", [z], self=T, other={"complex": [0.0, {"float": "inf"}]})
    assert scaled.dtype == torch.complex64


def test_integers():
    """Sums of integers stay integers; indices are those of the float64 computation."""
    codes = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    (total,) = run("aten.sum.default", [codes], wide=True, self=T)
    assert (total.dtype, int(total)) == (torch.int64, 10)
    values, indices = run("aten.topk.default", [X], wide=True, self=T, k=2)
    assert (values.dtype, indices.dtype) == (torch.float64, torch.int64)
    (best,) = run("aten.argmax.default", [X], wide=True, self=T, dim=-1)
    assert best.tolist() == [3, 3, 3]


def test_requests_for_a_narrower_dtype_are_widened():
    """A cast to bfloat16 rounds nothing in a truth, and a cast to 8 bits does."""
    (cast,) = run("aten._to_copy.default", [X / 3], wide=True, self=T, dtype={"dtype": "bfloat16"})
    assert torch.equal(cast, (X / 3).double())
    (total,) = run(
        "aten.sum.dim_IntList", [X / 3], wide=True, self=T, dim=[0], dtype={"dtype": "bfloat16"}
    )
    assert total.dtype == torch.float64
    (code,) = run("aten._to_copy.default", [X], wide=True, self=T, dtype={"dtype": "float8_e4m3fn"})
    assert code.dtype == torch.float8_e4m3fn


def test_the_device_is_replaced():
    """A constant made on the other machine's device is made on this one."""
    (found,) = run(
        "aten.arange.default",
        [],
        end=3,
        device={"device": "cuda:7"},
        dtype={"dtype": "int64"},
        pin_memory=False,
        layout={"layout": "strided"},
    )
    assert found.tolist() == [0, 1, 2]


def test_attention_without_a_float64_kernel():
    """Fused attention is written out: causal, masked and with grouped heads."""
    q, k, v = (torch.randn(1, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    names = {"query": T, "key": {"tensor": 1}, "value": {"tensor": 2}}
    narrow = [tensor.float() for tensor in (q, k, v)]
    for more in ({"is_causal": True}, {"scale": 0.3}):
        out, lse = run(
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            narrow,
            wide=True,
            **names,
            **more,
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.double() for tensor in narrow), enable_gqa=True, **more
        )
        torch.testing.assert_close(out, wanted, rtol=1e-13, atol=1e-13)
        assert lse.shape == (1, 4, 5)


def test_half_to_float():
    """A softmax that was asked for float32 of float16 is wide."""
    (found,) = run(
        "aten._softmax.default", [X.half()], wide=True, self=T, dim=-1, half_to_float=True
    )
    torch.testing.assert_close(found, X.half().double().softmax(-1), rtol=1e-15, atol=1e-15)


def test_a_norm_without_eps_keeps_the_formula():
    """Its eps is float32's, also where float64 computes it."""
    tiny = torch.full((2, 4), 1e-4)
    found, _ = run(
        "aten._fused_rms_norm.default",
        [tiny],
        wide=True,
        input=T,
        normalized_shape=[4],
        weight=None,
        eps=None,
    )
    wide = tiny.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


def test_random_numbers_are_not_drawn_again():
    """By the recorded note, or by what torch says of the operator; dropout of nothing is none."""
    assert refused("aten.rand_like.default", [X], self=T) == RANDOM
    assert refused("aten.native_dropout.default", [X], input=T, p=0.1, train=True) == RANDOM
    assert refused("aten.relu.default", [X], self=T, note="draws random numbers") == RANDOM
    found, _ = run("aten.native_dropout.default", [X], input=T, p=0.1, train=False)
    assert torch.equal(found, X)


def test_uninitialised_memory_is_no_result():
    """There is nothing to compare."""
    assert refused("aten.empty_like.default", [X], self=T) == UNINITIALISED, execute_ports


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("aten.from_file.default", "reads or writes files"),
        ("aten.save.default", "reads or writes files"),
        ("c10d.allreduce_.default", "works on several processes"),
        ("aten.manual_seed.default", "returns no tensor"),
        ("vendor.fused_thing.default", "this machine has no operator vendor.fused_thing.default"),
        ("aten.no_such_thing.default", "this machine has no operator"),
        ("load_library.x.y", "this machine has no operator"),
        ("higher_order.cond.default", "this machine has no operator"),
        ("__import__('os')", "is no operator's name"),
        pytest.param(
            "suite.no_such_thing", "has no operator suite.no_such_thing", marks=pytest.mark.whole
        ),
    ],
)
def test_names_that_run_nothing(operator, reason):
    """A run names its operators itself, so what a name can do is bounded."""
    assert reason in refused(operator)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"self": T, "other": 1}, "has no argument 'other'"),
        ({}, "needs an argument 'self'"),
        ({"self": {"tensor": 9}}, "cannot be read"),
        ({"self": {"tensor": True}}, "cannot be read"),
        ({"self": {"dtype": "load"}}, "no dtype load"),
        ({"self": {"float": "1e999"}}, "cannot be read"),
        ({"self": {"float": [1]}}, "cannot be read"),
        ({"self": {"object": "Generator"}}, "cannot be read"),
        ({"self": "text"}, "aten.relu does not run on cpu"),
    ],
    ids=str,
)
def test_damaged_calls(arguments, reason):
    """Each is refused with what is wrong, and nothing is run."""
    assert reason in refused("aten.relu.default", [X], **arguments)


def test_another_torch_s_schema():
    """A keyword that this torch does not know is named."""
    assert "has no argument 'rounding'" in refused("aten.relu.default", [X], self=T, rounding=1)


def test_a_custom_operator_without_float64():
    """It runs in its own dtype; in float64 it is refused, with its own words."""
    with torch.library._scoped_library("divtest", "DEF") as library:
        library.define("only32(Tensor x) -> Tensor")

        def only32(x):
            if x.dtype != torch.float32:
                raise NotImplementedError("float32 alone")
            return x + 1

        library.impl("only32", only32, "CPU")
        (found,) = run("divtest.only32.default", [X], x=T)
        assert torch.equal(found, X + 1)
        with pytest.raises(Refusal) as caught:
            run("divtest.only32.default", [X], wide=True, x=T)
    assert caught.value.reason == "divtest.only32 has no float64 kernel on cpu"
    assert caught.value.detail == "float32 alone"
