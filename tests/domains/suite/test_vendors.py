"""Vendors' own operators, with stand-ins that hold to their documented terms."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from divergence import CaseOptions, capture
from divergence.domains.suite.capturing import find

PAGED_ATTENTION, W8A8 = find("suite.paged_attention"), find("suite.w8a8_linear")


@pytest.fixture
def package(monkeypatch):
    """``package("torch_npu", name=function)`` stands for an installed one."""

    def install(title: str, **functions) -> None:
        module = ModuleType(title)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, title, module)

    return install


def paged(query, key_cache, value_cache, table, lengths, scale):
    return PAGED_ATTENTION.run(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=table,
        context_lens=lengths,
        scale=scale,
    )


@pytest.mark.parametrize("number", range(3))
def test_flash_attn_is_given_pages_that_it_takes(package, number):
    """Its pages hold a multiple of 256 tokens; the tokens stay the same."""

    def kernel(q, k, v, *, cache_seqlens, block_table, softmax_scale):
        assert k.shape[1] % 256 == 0 and k.is_contiguous() and block_table.dtype == torch.int32
        return paged(q[:, 0], k, v, block_table, cache_seqlens, softmax_scale)[:, None]

    package("flash_attn", flash_attn_with_kvcache=kernel)
    arguments = list(PAGED_ATTENTION.cases())[number * 4].make()

    found = PAGED_ATTENTION.implementations["flash_attn"](**arguments)

    torch.testing.assert_close(found, PAGED_ATTENTION.run(**arguments))


def ascend(
    query,
    key,
    value,
    *,
    block_table,
    block_size,
    num_heads,
    num_key_value_heads,
    input_layout,
    lengths,
    scale,
):
    assert input_layout == "BSH" and isinstance(lengths, list)
    batch, _, wide = query.shape
    pool = (-1, block_size, num_key_value_heads, wide // num_heads)
    caches = (x.reshape(pool) for x in (key, value))
    found = paged(
        query.reshape(batch, num_heads, -1),
        *caches,
        block_table,
        torch.tensor(lengths, dtype=torch.int32),
        scale,
    )
    return found.reshape(batch, 1, wide)


def older(*operands, actual_seq_lengths, scale_value, **paged):
    return ascend(*operands, lengths=actual_seq_lengths, scale=scale_value, **paged)


def newer(*operands, actual_seq_lengths_kv, scale, **paged):
    return ascend(*operands, lengths=actual_seq_lengths_kv, scale=scale, **paged), torch.empty(0)


@pytest.mark.parametrize(
    "functions",
    [
        {"npu_incre_flash_attention": older},
        {"npu_fused_infer_attention_score": newer},
        {"npu_fused_infer_attention_score": newer, "npu_incre_flash_attention": None},
    ],
)
def test_ascend_runs_the_attention_that_it_has(package, functions):
    """Whichever of its functions is installed gives the definition's result."""
    package("torch_npu", **functions)
    arguments = next(iter(PAGED_ATTENTION.cases())).make()

    found = PAGED_ATTENTION.implementations["torch_npu"](**arguments)

    torch.testing.assert_close(found, PAGED_ATTENTION.run(**arguments))


def test_ascend_multiplies_int8_itself(package):
    """torch._int_mm runs on the CPU there, so that the device is not what would be judged."""
    called = []

    def npu_quant_matmul(x1, x2, scale, *, pertoken_scale, output_dtype):
        assert x1.dtype == x2.dtype == torch.int8 and x1.shape[1] == x2.shape[0]
        called.append(output_dtype)
        product = x1.double() @ x2.double()
        return (product * pertoken_scale.double()[:, None] * scale.double()).to(output_dtype)

    package("torch_npu", npu_quant_matmul=npu_quant_matmul)
    arguments = next(iter(W8A8.cases())).make()

    found = W8A8.implementations["torch_npu"](**arguments)

    assert called == [getattr(torch, arguments["out_dtype"])]
    torch.testing.assert_close(found, W8A8.run(**arguments))
    there = SimpleNamespace(device=SimpleNamespace(type="npu"))
    with pytest.raises(AttributeError):  # the vendor's is called, with what it cannot take
        W8A8.run(x=there, weight=there, x_scale=0, weight_scale=0, out_dtype="float16")


def test_what_the_cpu_ran_is_not_judged_as_the_devices(monkeypatch, tmp_path):
    """The operator whose call was warned of is left out, with the reason."""

    def silu(x):
        warnings.warn(
            "The operator 'aten::silu.out' is not currently supported on the NPU backend "
            "and will fall back to run on the CPU.",
            stacklevel=1,
        )
        return torch.nn.functional.silu(x)

    run = capture(
        "suite:llm",
        out=tmp_path / "s",
        device="cpu",
        cases=CaseOptions(impl={"silu": silu}),
        sites=["silu.*", "softmax.*"],
        probe=False,
    )

    (reason,) = run.manifest.plan.skipped_operators
    assert reason.startswith("silu: the CPU ran it in place of cpu")
    assert not [r for r in run.records if "silu" in r.site]
    assert run.manifest.settings.cpu_fallbacks == ["aten::silu.out"]
