"""selfcheck: healthy models agree with themselves, and each planted fault is in its own line."""

import json

import pytest
import torch

from divergence import BatchOptions, RecordOptions, capture, selfcheck
from divergence.errors import UsageError

_QUICK = "again hooks batch place mates pads-left pads-right whole cache chunks attention".split()
"""Two threads disturb other tests, and compiling takes a minute."""


def _by_name(result):
    return {line.name: line for line in result.lines}


def _statuses(result):
    return {line.name: line.status for line in result.lines}


@pytest.mark.slow
def test_a_healthy_model_agrees_with_itself(llama):
    """In every way of running that was asked for."""
    lines = ("again", "hooks", "batch", "cache", "chunks")
    result = selfcheck(llama, dtype="float32", only=lines)

    told = _statuses(result)
    assert list(told) == list(lines)
    assert set(told.values()) <= {"identical", "within_floor"}
    assert (told["again"], told["hooks"]) == ("identical", "identical")
    assert not result.diverged and not result.not_repeated and result.kept is None
    assert json.loads(result.to_json())["schema_version"] == 1


@pytest.mark.slow
def test_a_pass_that_a_way_of_running_does_not_make_is_not_missing(llama):
    """In another place or among other mates a batch is run freely alone: its anchored pass is held
    against nothing, and nothing is said of it."""
    lines = _by_name(selfcheck(llama, dtype="float32", only=("batch", "place", "mates")))

    assert {line.status for line in lines.values()} <= {"identical", "within_floor"}
    assert [lines[name].num_missing for name in ("place", "mates")] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "mamba", "bert", "t5", "qwen3-moe", "gemma3"]
)
def test_no_line_of_a_healthy_model_diverges(tiny_model, architecture, dtype):
    """In no architecture; what a model cannot do is not applicable."""
    result = selfcheck(tiny_model(architecture), dtype=dtype, only=_QUICK)

    told = _statuses(result)
    assert "diverged" not in told.values() and "not_run" not in told.values()
    assert (told["again"], told["hooks"]) == ("identical", "identical")
    if architecture in ("bert", "t5", "mamba"):
        assert told["chunks"] == "not_applicable"
    if architecture in ("bert", "t5"):
        assert (told["cache"], told["pads-left"]) == ("not_applicable", "not_applicable")
    assert told["pads-right"] in ("identical", "within_floor")


@pytest.fixture
def in_attention(monkeypatch):
    """``in_attention(change)``: the output of block 1's attention is ``change(output)``."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    def plant(change):
        forward = LlamaAttention.forward

        def faulty(self, *args, **kwargs):
            output, *rest = forward(self, *args, **kwargs)
            return (change(output) if self.layer_idx == 1 else output, *rest)

        monkeypatch.setattr(LlamaAttention, "forward", faulty)

    return plant


@pytest.mark.slow
def test_noise_in_one_block_is_not_the_same_run_twice(llama, in_attention):
    """The block that does not repeat itself is named."""
    noise = torch.Generator().manual_seed(1)
    in_attention(lambda out: out * (1 + 0.2 * torch.randn(out.shape, generator=noise)))
    line = _by_name(selfcheck(llama, dtype="float32", only=["again"]))["again"]

    assert (line.status, line.block) == ("diverged", "model.layers.1")


@pytest.mark.slow
def test_noise_within_rounding_is_said_where_bits_must_be_equal(llama, in_attention):
    """It diverges nowhere, and is not repeated all the same."""
    noise = torch.Generator().manual_seed(1)
    in_attention(lambda out: out * (1 + 1e-7 * torch.randn(out.shape, generator=noise)))
    result = selfcheck(llama, dtype="float32", only=["again"])
    (line,) = result.lines

    assert line.status == "within_floor" and result.not_repeated == [line]
    assert (line.num_blocks_different, line.first_different) == (1, "model.layers.1")


@pytest.mark.slow
def test_a_kernel_that_depends_on_the_number_of_threads(llama, in_attention):
    """It is found by that line alone."""
    in_attention(lambda out: out * (1.5 if torch.get_num_threads() > 1 else 1.0))
    lines = _by_name(selfcheck(llama, dtype="float32", only=["again", "threads"]))

    assert lines["again"].status == "identical"
    line = lines["threads"]
    if line.status != "not_applicable":  # one core
        assert (line.status, line.block) == ("diverged", "model.layers.1")


@pytest.mark.slow
def test_attention_that_sees_pads(llama, monkeypatch):
    """Only the line with pads before the prompts tells: behind them no token sees one."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def blind(module, query, key, value, attention_mask, *args, **kwargs):
        if attention_mask is not None and module.layer_idx == 1:
            rows, columns = attention_mask.shape[-2:]
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.where(seen, 0.0, lowest).to(query.dtype)[None, None]
        return plain(module, query, key, value, attention_mask, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", blind)
    names = ["again", "batch", "pads-left", "pads-right", "cache"]
    lines = _by_name(selfcheck(llama, dtype="float32", only=names))

    line = lines.pop("pads-left")
    assert (line.status, line.block) == ("diverged", "model.layers.1")
    assert "diverged" not in {line.status for line in lines.values()}


@pytest.mark.slow
def test_attention_that_counts_its_rows_from_the_pads(llama, monkeypatch):
    """The diagonal at the end of the pads, not of the prompt: each token sees some behind it."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def ahead(module, query, key, value, attention_mask, *args, **kwargs):
        hidden = 0 if attention_mask is None else int((attention_mask[0, 0, -1] < 0).sum())
        if module.layer_idx == 1 and hidden:
            seen = torch.ones(attention_mask.shape[-2:], dtype=torch.bool).tril(hidden)
            attention_mask = torch.where(seen, 0.0, torch.finfo(query.dtype).min)[None, None]
        return plain(module, query, key, value, attention_mask, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", ahead)
    lines = _by_name(selfcheck(llama, dtype="float32", only=["again", "pads-right"]))

    line = lines.pop("pads-right")
    assert (line.status, line.block) == ("diverged", "model.layers.1")
    assert "prefill alone" in line.changed and line.num_missing == 0
    assert lines["again"].status == "identical"


@pytest.mark.slow
def test_positions_that_are_off_by_one_in_decode_steps(llama, monkeypatch):
    """With the cache alone: both lines that decode without one tell, and no other."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.apply_rotary_pos_emb

    def late(query, key, cos, sin, *args, **kwargs):
        if query.shape[2] == 1:  # a decode step with a cache: turned one position too far
            angle = torch.atan2(sin, cos)
            first = angle.shape[-1] // 2
            step = 1 / 10000 ** (torch.arange(first, dtype=angle.dtype) / first)
            angle = angle + torch.cat([step, step])
            cos, sin = angle.cos(), angle.sin()
        return plain(query, key, cos, sin, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", late)
    lines = _by_name(selfcheck(llama, dtype="float32", only=["again", "batch", "whole", "cache"]))

    assert [name for name, line in lines.items() if line.status == "diverged"] == ["whole", "cache"]
    assert lines["cache"].block is not None and lines["whole"].block is not None


def test_a_name_that_is_no_line(llama):
    """It is refused before the model is loaded."""
    with pytest.raises(UsageError, match="no line 'cash'"):
        selfcheck(llama, only=["cash"])


def test_forwards_that_a_model_cannot_be_run_by_are_refused(tiny_model, tmp_path):
    """Each with the reason."""
    with pytest.raises(UsageError, match="--no-cache is for causal language models"):
        capture(tiny_model("bert"), out=tmp_path / "a", batching=BatchOptions(use_cache=False))
    with pytest.raises(UsageError, match="keeps a state"):
        capture(tiny_model("mamba"), out=tmp_path / "b", batching=BatchOptions(prefill_chunk=4))
    with pytest.raises(UsageError, match="--plant needs hooks"):
        capture(
            "any",
            out=tmp_path / "c",
            recording=RecordOptions(hooks=False),
            plants=["lm_head:out=scale:2"],
        )
    with pytest.raises(UsageError, match="does not hold each of the prompts 0 to 0 once"):
        capture(tiny_model("llama"), out=tmp_path / "d", batching=BatchOptions(batches="0,1"))
