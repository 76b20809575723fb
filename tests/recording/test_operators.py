"""Operators inside a module: what is recorded of a call, and what flows where."""

import pytest
import torch

from divergence import RecordOptions, Run, capture
from divergence import truth as make_truth
from divergence.errors import UsageError
from divergence.recording.dispatch import OperatorRecorder
from divergence.recording.keeper import CopyKeeper

BLOCK = "model.layers.1"


class Seen:
    """Records of a toy module, by site."""

    def __init__(self, module, *inputs, weights=False):
        self.tensors, self.calls = {}, {}
        recorder = OperatorRecorder(
            module,
            {"."},
            emit=self._emit,
            call_of=lambda path: "",
            active=lambda: True,
            keep=CopyKeeper().keep,
            weights=weights,
        )
        with torch.no_grad(), recorder.installed():
            self.result = module(*inputs)
        self.skipped = recorder.skipped

    def _emit(self, site, item, call=None):
        assert site not in self.tensors
        self.tensors[site] = item.tensor
        if call is not None:
            self.calls[site] = call


class Lambda(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def seen(function, *inputs, **options):
    return Seen(Lambda(function), *inputs, **options)


X = torch.arange(6.0).reshape(2, 3)


def test_a_value_is_recorded_once_and_referred_to():
    """The sum's operand is the product's record, not a copy of it."""
    found = seen(lambda x: (x * 2) + 1, X)
    assert list(found.tensors) == ["./aten.mul:in.self", "./aten.mul:out", "./aten.add:out"]
    (operand,) = found.calls["./aten.add:out"].operands
    assert (operand.site, operand.origin) == ("./aten.mul:out", "./aten.mul:out")
    assert found.calls["./aten.mul:out"].arguments == {"self": {"tensor": 0}, "other": 2}
    assert found.calls["./aten.mul:out"].operator == "aten.mul.Tensor"


def test_views_are_told_in_the_operand_that_is_one():
    """No record of their own: where the memory came from, and how it is looked at."""
    found = seen(lambda x: (x * 2).t()[1:].exp(), X)
    (operand,) = found.calls["./aten.exp:out"].operands
    assert operand.origin == "./aten.mul:out"
    assert operand.via == ("t()", "slice(0, 1, end)")
    assert (operand.shape, operand.stride) == ((2, 2), (1, 3))
    assert torch.equal(found.tensors["./aten.exp:in.self"], (X * 2).t()[1:])


def test_another_shape_of_the_same_bytes_is_the_same_record():
    """A reshape copies nothing, on disk either."""
    found = seen(lambda x: (x * 2).view(3, 2).exp(), X)
    (operand,) = found.calls["./aten.exp:out"].operands
    assert (operand.site, operand.shape) == ("./aten.mul:out", (3, 2))


def test_an_input_is_recorded_before_it_is_written_to():
    """In place: the operand is what was there before, the result what is there now."""
    found = seen(lambda x: x.add_(1).mul_(3), X.clone())
    assert torch.equal(found.tensors["./aten.add_:in.self"], X)
    assert torch.equal(found.tensors["./aten.add_:out"], X + 1)
    (operand,) = found.calls["./aten.mul_:out"].operands
    assert operand.site == "./aten.add_:out"


def test_a_write_through_a_view_is_not_missed():
    """The whole is recorded anew after a part of it was written."""

    def function(x):
        y = x * 1
        y[0] = 7.0
        return y.exp()

    found = seen(function, X)
    operand = found.calls["./aten.exp:out"].operands[0]
    assert operand.origin is None  # in part the product, in part the constant
    assert torch.equal(found.tensors[operand.site][0], torch.full((3,), 7.0))


def test_calls_are_numbered_by_operator():
    """The second product is #2, whatever ran in between."""
    found = seen(lambda x: ((x * 2) + 1) * 3, X)
    assert "./aten.mul#2:out" in found.tensors


def test_several_results_and_scalars_are_kept():
    """Top-k: values and indices, and every argument by its name."""
    found = seen(lambda x: torch.topk(x, 2, dim=-1, largest=False), X)
    call = found.calls["./aten.topk:out"]
    assert call.arguments == {"self": {"tensor": 0}, "k": 2, "dim": -1, "largest": False}
    assert found.tensors["./aten.topk:out.1"].dtype == torch.int64


def test_what_json_has_no_word_for_is_spelled_out():
    """Infinities, dtypes, lists of tensors with holes."""
    found = seen(lambda x: x.masked_fill(x > 1, -float("inf")).to(torch.bfloat16), X)
    assert found.calls["./aten.masked_fill:out"].arguments["value"] == {"float": "-inf"}
    assert found.calls["./aten._to_copy:out"].arguments["dtype"] == {"dtype": "bfloat16"}
    found = seen(lambda x: x[:, torch.tensor([0, 2])], X)
    indices = found.calls["./aten.index:out"].arguments["indices"]
    assert indices == [None, {"tensor": 1}]


def test_random_numbers_are_noted():
    """Running it again cannot give the same; attention without dropout can."""
    found = seen(lambda x: torch.bernoulli(x.sigmoid()), X)
    assert found.calls["./aten.bernoulli:out"].note == "draws random numbers"
    q = torch.randn(1, 1, 4, 8)
    found = seen(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), q)
    assert {call.note for call in found.calls.values()} == {None}


def test_shapes_that_depend_on_data_and_other_types_are_recorded():
    """nonzero, integers, complex numbers: as they are."""
    found = seen(lambda x: torch.nonzero(x > 3) + 1, X)
    assert found.tensors["./aten.nonzero:out"].shape == (2, 2)
    found = seen(lambda x: torch.view_as_complex(x).abs(), torch.randn(3, 2))
    assert found.tensors["./aten.abs:in.self"].dtype == torch.complex64


def test_a_custom_operator_is_recorded_under_its_own_name():
    """Whatever is registered with torch is an operator."""

    @torch.library.custom_op("divergence_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    found = seen(lambda x: twice(x), X)
    assert found.calls["./divergence_tests.twice:out"].operator == "divergence_tests.twice.default"


def test_weights_are_named_and_stored_on_request():
    """By digest alone, or with a record of the whole weight."""
    linear = torch.nn.Linear(3, 2)
    found = Seen(linear, X)
    (call,) = found.calls.values()
    weight = call.operands[2]
    assert (weight.weight, weight.site, weight.via) == ("weight", None, ("t()",))
    assert len(weight.xxh3) == 32
    found = Seen(linear, X, weights=True)
    assert torch.equal(found.tensors[".:in.weight"], linear.weight)


@pytest.mark.slow
def test_the_result_is_not_changed_by_recording(llama, tmp_path):
    """Not a bit, in a real model and every dtype."""
    for dtype in ("float32", "bfloat16"):
        a = capture(
            llama,
            out=tmp_path / f"a-{dtype}",
            prompts=["one two three"],
            dtype=dtype,
            max_new_tokens=2,
        )
        b = capture(like=a, out=tmp_path / f"b-{dtype}")
        ops = capture(like=a, out=tmp_path / f"o-{dtype}", sites=["blocks", f"ops@{BLOCK}"])
        for record in b.records:
            assert ops.find(record.coordinates).xxh3 == record.xxh3


@pytest.fixture(scope="module")
def recorded(llama, tmp_path_factory) -> tuple[Run, Run, Run]:
    """A run, its block's operators, and the truth of both."""
    folder = tmp_path_factory.mktemp("operators")
    a = capture(
        llama, out=folder / "a", prompts=["one two three"], max_new_tokens=2, dtype="bfloat16"
    )
    ops = capture(
        like=a, out=folder / "ops", sites=[f"ops@{BLOCK}"], recording=RecordOptions(weights=True)
    )
    return a, ops, make_truth(a, out=folder / "truth", sites=[f"ops@{BLOCK}"])


def test_operators_are_recorded_in_the_anchored_pass_of_one_block(recorded):
    """Once, at the block named, with module, source line and the block's own input as origin."""
    _, ops, _ = recorded
    calls = [record for record in ops.records if record.call]
    assert {record.pass_ for record in calls} == {"anchored"}
    assert {record.step for record in calls} == {0, 1}
    assert all(record.site.startswith(BLOCK) for record in calls)
    (first,) = [
        r for r in calls if r.site == f"{BLOCK}.input_layernorm/aten._to_copy:out" and r.step == 0
    ]
    assert first.call.operands[0].origin == f"{BLOCK}:in"
    assert first.call.source.startswith("modeling_llama.py:")
    assert ops.find(("anchored", 0, 0, f"{BLOCK}:out")) is not None


def test_every_operand_is_a_record_of_the_same_forward(recorded):
    """Or a weight that was stored: replaying needs nothing else."""
    for run in recorded[1:]:
        for record in run.records:
            for operand in record.call.operands if record.call else ():
                if operand.site is None:
                    assert operand.weight is not None
                    continue
                held = run.find((record.pass_, record.sample, record.step, operand.site))
                assert held is not None
                if operand.weight is None:
                    assert held.numel == torch.Size(operand.shape).numel()
                    assert held.dtype == operand.dtype


def test_the_truth_holds_the_same_operators_in_float64(recorded):
    """All but the casts, of which there are none in float64."""
    _, ops, truth = recorded
    sites = {r.site for r in ops.records if r.call}
    right = {r.site: r for r in truth.records if r.call}
    assert {site for site in sites - set(right)} == {
        f"{BLOCK}.{name}/aten._to_copy#2:out"
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm")
    }
    assert {r.dtype for r in right.values()} == {"float64"}


def test_a_wrong_module_is_named(llama, tmp_path):
    """With a near one."""
    with pytest.raises(UsageError, match=r"no module of this model matches 'model.layer.1'"):
        capture(llama, out=tmp_path / "x", sites=["ops@model.layer.1"])


def test_a_dry_run_lists_operators(llama, dry_run):
    """Without a weight loaded."""
    plan = dry_run(llama, "--sites", f"ops@{BLOCK}", "--max-new-tokens", 1)
    assert f"{BLOCK}.mlp/aten.mul:out" in {row["site"] for row in plan["rows"]}


def test_a_weight_that_several_modules_use_is_recorded_once_a_forward(shared_run):
    """T5's embedding is read by the encoder and by the decoder: one record, two calls."""
    run = shared_run(
        "t5",
        prompts=["a b"],
        max_new_tokens=1,
        sites=["ops@encoder.embed_tokens", "ops@decoder.embed_tokens"],
        recording=RecordOptions(weights=True),
    )
    weights = [record for record in run.records if record.site.endswith("in.weight")]
    calls = [record.call for record in run.records if record.call is not None]
    (weight,) = weights
    assert len(calls) == 2
    assert {call.operands[0].site for call in calls} == {weight.site}


def test_a_buffer_that_is_written_to_is_no_weight():
    """Its value changes: it is recorded where it is used, not once."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(1)
            return x * self.count

    found = Seen(Counting(), torch.ones(3), weights=True)
    (_, count) = found.calls["./aten.mul:out"].operands
    assert count.weight is None
    assert torch.equal(found.tensors[count.site], torch.ones(3))


def test_the_parts_of_one_memory_are_weights_each_from_its_own_beginning():
    """Two parameters cut from one tensor: each operand lies inside the one that it is."""

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.arange(12.0).reshape(4, 3)
            self.second = torch.nn.Parameter(memory[2:], requires_grad=False)
            self.first = torch.nn.Parameter(memory[:2], requires_grad=False)

        def forward(self, x):
            return x @ self.first[1:].t() + x @ self.second.t()

    found = Seen(Fused(), torch.ones(1, 3))
    operands = [found.calls[f"./aten.mm{n}:out"].operands[1] for n in ("", "#2")]
    assert [(o.weight, o.offset) for o in operands] == [("first", 3), ("second", 0)]


def test_what_is_no_part_of_one_contiguous_weight_is_recorded_by_value():
    """A weight kept transposed, or seen beyond its end: its bytes have another order, or more."""

    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.arange(12.0).reshape(4, 3)
            self.turned = torch.nn.Parameter(memory.t(), requires_grad=False)
            self.part = torch.nn.Parameter(torch.arange(6.0)[:3], requires_grad=False)

        def forward(self, x):
            return x @ self.turned.t(), self.part.as_strided((6,), (1,)) * 2

    found = Seen(Turned(), torch.ones(1, 4))
    for site, wanted in (
        ("./aten.mm:out", torch.arange(12.0).reshape(4, 3)),
        ("./aten.mul:out", torch.arange(6.0)),
    ):
        operand = found.calls[site].operands[-1]
        assert operand.weight is None
        assert torch.equal(found.tensors[operand.site], wanted)


def test_a_view_in_place_is_a_view():
    """`t_()` turns a tensor and writes no byte of it."""
    found = seen(lambda x: (x * 2).t_() + 1, X)
    assert list(found.calls) == ["./aten.mul:out", "./aten.add:out"]
    (operand,) = found.calls["./aten.add:out"].operands
    assert (operand.origin, operand.via) == ("./aten.mul:out", ("t_()",))
    assert torch.equal(found.tensors[operand.site], (X * 2).t())


def test_an_exception_that_the_model_catches_leaves_its_module():
    """A fast path that fails: what follows belongs to the module that tries another."""

    class Missing(torch.nn.Module):
        def forward(self, x):
            raise ImportError("no such kernel")

    class Trying(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fast = Missing()

        def forward(self, x):
            try:
                return self.fast(x)
            except ImportError:
                return x * 2

    model = torch.nn.Sequential(Trying())
    found = Seen(model, X)
    assert list(found.calls) == ["0/aten.mul:out"]


def test_wide_passes_record_weights_as_they_were_loaded(recorded, tmp_path):
    """One digest in every pass and in the truth, and bytes in the model's own dtype."""
    a, ops, truth = recorded
    wide = capture(
        like=a,
        out=tmp_path / "wide",
        sites=[f"ops@{BLOCK}"],
        recording=RecordOptions(weights=True, escalate=True, anchor=False),
    )
    digests = [
        {o.weight: o.xxh3 for r in run.records if r.call for o in r.call.operands if o.weight}
        for run in (ops, truth, wide)
    ]
    assert digests[0] and digests[0] == digests[1] == digests[2]
    assert {r.dtype for r in wide.records if r.site.endswith("in.weight")} == {"bfloat16"}


def test_a_substitute_of_another_size_is_refused(recorded, llama, tmp_path):
    """With both sizes and the operator."""
    a, _, _ = recorded
    site = f"{BLOCK}.mlp.down_proj/aten.mm:out"
    longer = capture(
        llama,
        out=tmp_path / "longer",
        prompts=["one two three four five six"],
        max_new_tokens=1,
        dtype="bfloat16",
        sites=[f"ops@{BLOCK}"],
    )
    with pytest.raises(UsageError, match=r"down_proj/aten.mm gives \(\d+, 64\) here, and \("):
        capture(
            like=a,
            out=tmp_path / "x",
            sites=[f"ops@{BLOCK}"],
            recording=RecordOptions(substitutes={site: longer}),
        )


@pytest.mark.slow
def test_a_compiled_module_is_said_to_be_recorded_uncompiled(llama, tmp_path):
    """Its kernels are not what the records are of."""
    said = []

    def prepare(model):
        mlp = model.get_submodule(f"{BLOCK}.mlp")
        mlp.compile(backend="eager")

    capture(
        llama,
        out=tmp_path / "a",
        prompts=["one"],
        max_new_tokens=1,
        sites=[f"ops@{BLOCK}"],
        prepare=prepare,
        progress=lambda event, done, total, detail: said.append(detail),
    )
    assert any(f"{BLOCK}.mlp runs through torch.compile" in text for text in said)
