"""A run from elsewhere chooses operators and arguments: none reaches beyond what it is given."""

import warnings

import msgspec
import pytest
import torch

from divergence import replay, repro
from divergence.errors import UsageError
from divergence.ops import bounds
from divergence.ops.allowed import Refusal, Unsafe, check_operator
from divergence.ops.replay import execute_ports
from divergence.run.record import Call, Operand
from tests import by_hand

X = torch.arange(12.0).reshape(3, 4)
I = torch.tensor([0, 2])  # noqa: E741
S = torch.tensor([0, 3])
"""One beyond the rows of X."""


def run(operator: str, tensors: list[torch.Tensor], /, *, wide=False, namespaces=None, **arguments):
    """The call on the CPU; ``"T0"`` stands for the first tensor."""
    operands = tuple(
        Operand(
            site=f"a:in.{number}",
            shape=tuple(one.shape),
            dtype=str(one.dtype).removeprefix("torch."),
            stride=None if one.is_contiguous() else one.stride(),
        )
        for number, one in enumerate(tensors)
    )

    def named(value):
        if isinstance(value, list):
            return [named(one) for one in value]
        is_tensor = isinstance(value, str) and value[0] == "T"
        return {"tensor": int(value[1:])} if is_tensor else value

    arguments = {name: named(value) for name, value in arguments.items()}
    return execute_ports(
        Call(operator=operator, arguments=arguments, operands=operands),
        [one.contiguous() for one in tensors],
        device="cpu",
        namespaces=namespaces,
        compute_dtype=torch.float64 if wide else None,
    )


def named_ids(value):
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("aten._reshape_alias.default", dict(self="T0", size=[4096], stride=[1])),
        ("aten._reshape_alias_copy.default", dict(self="T0", size=[64, 64], stride=[640, 1])),
        ("aten.as_strided.default", dict(self="T0", size=[64], stride=[1])),
        ("aten.as_strided_copy.default", dict(self="T0", size=[2], stride=[-1], storage_offset=99)),
        ("aten.as_strided_.default", dict(self="T0", size=[64], stride=[1])),
        ("aten.as_strided_scatter.default", dict(self="T0", src="T0", size=[3, 4], stride=[9, 9])),
        ("aten.set_.source_Tensor", dict(self="T0", source="T0")),
        (
            "aten.set_.source_Tensor_storage_offset",
            dict(self="T0", source="T0", storage_offset=9, size=[9], stride=[1]),
        ),
        (
            "aten._nested_view_from_buffer.default",
            dict(self="T0", nested_size="T0", nested_strides="T0", offsets="T0"),
        ),
        ("aten._unsafe_index.Tensor", dict(self="T0", indices=["T1"])),
        ("aten._resize_output_.default", dict(self="T0", size=[99], device={"device": "cpu"})),
        ("aten._sparse_coo_tensor_unsafe.default", dict(indices="T1", values="T0", size=[9])),
        ("aten._cholesky_solve_helper.default", dict(self="T0", A="T0", upper=False)),
        ("aten._pack_padded_sequence.default", dict(input="T0", lengths="T1", batch_first=False)),
        (
            "aten.max_pool2d_with_indices_backward.default",
            dict(self="T0", grad_output="T0", indices="T1", ceil_mode=False)
            | dict(kernel_size=[1], stride=[1], padding=[0], dilation=[1]),
        ),
        ("aten.view.default", dict(self="T0", size=[12])),
        ("aten._logcumsumexp.out", dict(self="T0", dim=1, out="T1")),
        ("aten.mvlgamma.default", dict(self="T0", p=10**9)),
        ("aten.clone.out", dict(self="T0", out="T1")),
        ("prims.as_strided.default", dict(a="T0", size=[64], stride=[1], storage_offset=0)),
    ],
    ids=named_ids,
)
def test_what_sees_raw_memory_is_never_run(operator, arguments):
    """Whoever asks."""
    for namespaces in (None, {"cpu"}):
        with pytest.raises(Unsafe):
            run(operator, [X, I], namespaces=namespaces, **arguments)


@pytest.mark.parametrize("space", ["prims", "quantized", "inductor", "debugprims", "mkldnn", "mkl"])
def test_torch_s_other_namespaces_are_not_run(space):
    """They are helpers of compilers and tests, whose callers are trusted."""
    with pytest.raises(Refusal):
        run(f"{space}.anything.default", [X])


@pytest.mark.parametrize(
    ("operator", "index", "arguments"),
    [
        ("aten.embedding.default", S, {"weight": "T0", "indices": "T1"}),
        ("aten.embedding.default", -I, {"weight": "T0", "indices": "T1"}),
        ("aten.index_select.default", S, {"self": "T0", "dim": 0, "index": "T1"}),
        ("aten.index_select.default", S + 1, {"self": "T0", "dim": -1, "index": "T1"}),
        ("aten.index_select.default", I, {"self": "T0", "dim": 9, "index": "T1"}),
        ("aten.gather.default", S.reshape(1, 2), {"self": "T0", "dim": 0, "index": "T1"}),
        ("aten.scatter.src", S.reshape(1, 2), {"self": "T0", "dim": 0, "index": "T1", "src": "T0"}),
        (
            "aten.scatter_add_.default",
            -S.reshape(1, 2),
            {"self": "T0", "dim": 0, "index": "T1", "src": "T0"},
        ),
        ("aten.index_add.default", S, {"self": "T0", "dim": 0, "index": "T1", "source": "T0"}),
        ("aten.index_copy_.default", S, {"self": "T0", "dim": 0, "index": "T1", "source": "T0"}),
        ("aten.index_fill.int_Scalar", S, {"self": "T0", "dim": 0, "index": "T1", "value": 1}),
        ("aten.index.Tensor", S, {"self": "T0", "indices": ["T1"]}),
        ("aten.index.Tensor", S + 1, {"self": "T0", "indices": [None, "T1"]}),
        ("aten.index.Tensor", torch.ones(4, dtype=torch.bool), {"self": "T0", "indices": ["T1"]}),
        ("aten.index_put_.default", -S - 1, {"self": "T0", "indices": ["T1"], "values": "T0"}),
        (
            "aten._index_put_impl_.default",
            S,
            {"self": "T0", "indices": ["T1"], "values": "T0", "unsafe": True},
        ),
        ("aten.take.default", S * 4, {"self": "T0", "index": "T1"}),
        ("aten.repeat_interleave.Tensor", -S, {"repeats": "T1"}),
        ("aten.repeat_interleave.Tensor", S, {"repeats": "T1", "output_size": 9}),
        ("aten.searchsorted.Tensor", S, {"sorted_sequence": "T1", "self": "T0", "sorter": "T1"}),
    ],
    ids=named_ids,
)
def test_indices_lie_within_what_they_point_into(operator, index, arguments):
    """Checked here, whatever the kernel of a device checks."""
    with pytest.raises(Unsafe, match="cannot be given this"):
        run(operator, [X, index], **arguments)


def test_indices_within_are_run():
    """Also from the end, where torch counts so, and as masks."""
    for index in (I, I - 3, torch.tensor([True, False, True])):
        (found,) = run("aten.index.Tensor", [X, index], self="T0", indices=["T1"]).values()
        assert torch.equal(found, X[index])
    (found,) = run("aten.repeat_interleave.Tensor", [I], repeats="T0").values()
    assert found.tolist() == [1, 1]


Q, K = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8)


@pytest.mark.parametrize(
    "tensors",
    [
        [Q, K, K[:, :, :3]],
        [Q, K[..., :4], K],
        [Q.expand(3, 4, 5, 8), K, K],
        [Q[:, :3], K, K],
        [Q, K, K, torch.zeros(5, 2)],
        [Q, K, K, torch.zeros(2, 1, 1, 5, 6)],
        [Q, K, K, torch.zeros(1, 5, 5, 6)],
        [Q[0], K, K],
    ],
    ids=lambda tensors: " ".join("x".join(map(str, one.shape)) for one in tensors),
)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_operands_of_attention_belong_together(tensors, wide):
    """The fused kernels leave that to their public wrapper."""
    names = {"query": "T0", "key": "T1", "value": "T2"} | (
        {"attn_mask": "T3"} if len(tensors) > 3 else {}
    )
    with pytest.raises(Unsafe):
        run("aten._scaled_dot_product_flash_attention_for_cpu.default", tensors, wide=wide, **names)


NORMED = dict(input="T0", weight="T1", eps=1e-6)
BATCHED = dict(input="T0", weight=None, bias=None, momentum=0.1, eps=1e-6)


@pytest.mark.parametrize(
    ("operator", "tensors", "arguments"),
    [
        ("_fused_rms_norm", [X, X[0, :2]], NORMED | dict(normalized_shape=[4])),
        ("_fused_rms_norm", [X], NORMED | dict(normalized_shape=[400], weight=None)),
        ("native_layer_norm", [X, X[0, :2]], NORMED | dict(normalized_shape=[4], bias=None)),
        (
            "native_group_norm",
            [X],
            NORMED | dict(weight=None, bias=None, N=3, C=4, HxW=99, group=2),
        ),
        (
            "_fft_c2r",
            [X.to(torch.complex64)],
            dict(self="T0", dim=[1], normalization=0, last_dim_size=4096),
        ),
        ("_fft_r2c", [X], dict(self="T0", dim=[7], normalization=0, onesided=True)),
        ("_fft_c2c", [X], dict(self="T0", dim=[0], normalization=0, forward=True)),
        ("_weight_norm_interface", [X, X[:, :0]], dict(v="T0", g="T1", dim=0)),
        (
            "native_batch_norm",
            [X],
            BATCHED | dict(running_mean=None, running_var=None, training=False),
        ),
        (
            "_native_batch_norm_legit_no_training",
            [X, X[0, :3]],
            BATCHED | dict(running_mean="T1", running_var="T1"),
        ),
        ("_foreach_copy", [X], dict(self=[], src=["T0"])),
        ("zeros_like", [X], dict(self="T0", memory_format=-7)),
        ("sum", [X], dict(self="T0", dtype=999)),
        (
            "_grouped_mm",
            [X.bfloat16(), X.bfloat16()[None].mT, torch.tensor([9]).int()],
            dict(self="T0", mat2="T1", offs="T2"),
        ),
    ],
    ids=named_ids,
)
def test_shapes_of_private_operators_fit(operator, tensors, arguments):
    """Weights of another length, and axes that are not there, are read beyond their ends."""
    with pytest.raises(Unsafe, match="cannot be given this"):
        run(f"aten.{operator}.default", tensors, **arguments)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("aten.zeros.default", {"size": [1 << 20, 1 << 20]}),
        ("aten.full.default", {"size": [1 << 40], "fill_value": 1}),
        ("aten.arange.default", {"end": 1 << 42}),
        ("aten.constant_pad_nd.default", {"self": "T0", "pad": [0, 1 << 40]}),
        ("aten.repeat.default", {"self": "T0", "repeats": [1 << 20, 1 << 20]}),
        ("aten.upsample_nearest2d.default", {"self": "T1", "output_size": [1 << 20, 1 << 20]}),
        ("aten.histc.default", {"self": "T0", "bins": 1 << 42}),
        ("aten.repeat_interleave.Tensor", {"repeats": "T2"}),
        ("aten.bincount.default", {"self": "T2"}),
        ("aten.bincount.default", {"self": "T3", "minlength": 1 << 42}),
    ],
    ids=named_ids,
)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_a_result_that_fits_into_no_memory_is_refused_before(operator, arguments, wide):
    """Its size is computed without it: on the meta device, or from the values."""
    tensors = [X, X.reshape(1, 1, 3, 4), torch.tensor([1 << 42]), I]
    with pytest.raises(Unsafe, match=r"would give|cannot be given"):
        run(operator, tensors, wide=wide, **arguments)


def test_attention_s_scores_are_counted_too(monkeypatch):
    """In float64 it is written out: what it holds on the way is bounded like a result."""
    monkeypatch.setattr(bounds, "SMALL_BYTES", 1 << 10)
    monkeypatch.setattr(bounds, "_most_bytes", lambda bound: 1 << 16)
    q = torch.randn(1, 1, 512, 1)
    names = {"query": "T0", "key": "T1", "value": "T2"}
    operator = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    with pytest.raises(Unsafe, match="would give"):
        run(operator, [q, q, q], wide=True, **names)
    assert run(operator, [q, q, q], **names)["out"].shape == q.shape


def test_a_suite_s_operators_are_held_to_the_same(own_operators):
    """Whatever they call inside."""

    class Embedding:
        run = staticmethod(lambda ids, weight: torch.nn.functional.embedding(ids, weight))
        truth = staticmethod(lambda ids, weight: weight[ids])

    own_operators({"suite.embedding": Embedding})
    for wide in (False, True):
        with pytest.raises(Unsafe) as caught:
            run("suite.embedding", [S, X], wide=wide, ids="T0", weight="T1")
        assert caught.value.detail == "indices 0 to 3 into 3"


def test_packages_are_asked_for():
    """What another package registered runs only where the caller named it."""
    with torch.library._scoped_library("divtest3", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        with pytest.raises(Unsafe, match=r"only on request \(--operators divtest3\)"):
            run("divtest3.twice.default", [X], x="T0", namespaces={"cpu"})
        (found,) = run("divtest3.twice.default", [X], x="T0", namespaces={"divtest3"}).values()
    assert torch.equal(found, X * 2)


def test_schemas_of_packages_are_held_to_the_same():
    """Also where they are asked for: no raw strides, and nothing that no run records."""
    with torch.library._scoped_library("divtest4", "DEF") as library:
        library.define("raw(Tensor x, int[] size, int[] stride) -> Tensor")
        library.define("kept(Storage s) -> Tensor")
        library.define("seen(Tensor(a) x) -> Tensor(a)")
        for name in ("raw", "kept", "seen"):
            with pytest.raises(Unsafe):
                check_operator(getattr(torch.ops.divtest4, name).default)


@pytest.mark.slow
def test_all_of_this_holds_in_replay_and_repro(record, tmp_path):
    """A recorded run whose operator was exchanged: nothing is run, nothing is written."""

    def other(record, tensor):
        return tensor, record.call and msgspec.structs.replace(
            record.call,
            operator="aten._reshape_alias_copy.default",
            arguments={"self": {"tensor": 0}, "size": [4096], "stride": [1]},
        )

    source = record(lambda: torch.relu(X))
    bad = by_hand.rewritten(source, tmp_path / "bad", other)
    site = next(one.site for one in bad.records if one.call)
    with pytest.raises(UsageError, match="none of the 1 operators") as caught:
        replay(bad, out=tmp_path / "again", device="cpu")
    assert "raw sizes and strides" in caught.value.where
    for truth in (None, replay(source, out=tmp_path / "truth", truth=True)):
        with pytest.raises(UsageError, match="raw sizes and strides"):
            repro(bad, site=site, out=tmp_path / "bug", truth=truth)
    assert not (tmp_path / "bug").exists()


def test_asking_for_a_size_says_nothing():
    """What torch's meta kernels warn of is not the operator's warning."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run("aten.histc.default", [X], self="T0", bins=4)
    finally:
        torch.use_deterministic_algorithms(False)
