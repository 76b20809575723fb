"""vLLM's form of a decoder layer, made of plain torch modules, seen as transformers'."""

import contextlib

import pytest
import torch
from torch import nn

from divergence.domains.vllm.engine import head_hooked, table_viewed, viewed
from divergence.errors import PlantError


class FusedNorm(nn.Module):
    """As vLLM's: (x, residual) → (norm of the sum, the sum), written in place."""

    def forward(self, *args):  # hides its parameters, as vLLM's does
        return self.forward_native(*args)

    def forward_native(self, x, residual=None):
        if residual is None:
            return x / 2
        residual += x
        x.copy_(residual / 2)
        return x, residual


class Fused(nn.Module):
    """Two outputs in one matrix; a bias behind it, as vLLM's linear layers give."""

    def forward(self, input_):
        return torch.cat([input_ * 3, input_ * 5], dim=-1), None


class Layer(nn.Module):
    """(positions, hidden, residual) → (hidden, residual)."""

    def __init__(self):
        super().__init__()
        self.norm, self.fused = FusedNorm(), Fused()

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual, hidden_states = hidden_states, self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        both, _ = self.fused(hidden_states)
        return both[:, :2] + both[:, 2:], residual


class Seen:
    """The hooks of a recorder: note what is shown, and put something in its place."""

    def __init__(self, *, give_in=None, give_out=None):
        self.given, self.taken = [], []
        self._in, self._out = give_in, give_out

    def before(self, module, args, kwargs):
        self.given.append(args[0].clone())
        return None if self._in is None else ((self._in.clone(),), {})

    def after(self, module, args, kwargs, output):
        self.taken.append(output.clone())
        return self._out


HIDDEN = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
RESIDUAL = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


def run(layer, seen, residual=RESIDUAL, *, module=None, **how):
    with viewed(module or layer, seen.before, seen.after, **how):
        given = None if residual is None else residual.clone()
        return layer(torch.arange(3), HIDDEN.clone(), given)


def test_a_block_takes_and_gives_the_sum():
    """What is shown has a batch axis, and is hidden + residual on both sides."""
    seen = Seen()
    hidden, residual = run(Layer(), seen, is_block=True)
    assert torch.equal(seen.given[0], (HIDDEN + RESIDUAL)[None])
    assert torch.equal(seen.taken[0], (hidden + residual)[None])
    assert torch.equal(residual, HIDDEN + RESIDUAL)


def test_the_first_block_has_no_residual():
    """There hidden alone is the stream."""
    seen = Seen()
    run(Layer(), seen, residual=None, is_block=True)
    assert torch.equal(seen.given[0], HIDDEN[None])


@pytest.mark.parametrize("residual", [None, RESIDUAL], ids=["first", "later"])
def test_a_recorded_input_is_put_in_place(residual):
    """The layer computes on it, whatever form of the stream it expects."""
    recorded = torch.full((1, 3, 2), 7.0)
    hidden, stream = run(Layer(), Seen(give_in=recorded), residual, is_block=True)
    assert torch.equal(stream, recorded[0])
    assert torch.equal(hidden, recorded[0] / 2 * 8)


def test_a_changed_output_is_the_next_stream():
    """Hidden and residual then sum to it."""
    new = torch.full((1, 3, 2), 9.0)
    hidden, residual = run(Layer(), Seen(give_out=new), is_block=True)
    assert torch.equal(hidden + residual, new[0])


def test_a_norm_is_shown_the_sum():
    """Its input is the stream, its output the first of two."""
    layer, seen = Layer(), Seen()
    run(layer, seen, module=layer.norm)
    assert torch.equal(seen.given[0], (HIDDEN + RESIDUAL)[None])
    assert torch.equal(seen.taken[0], (HIDDEN + RESIDUAL)[None] / 2)


def test_a_changed_input_of_a_norm_is_its_own():
    """The stream goes on as it was, as in transformers, where the norm has no part in it."""
    layer = Layer()
    hidden, residual = run(layer, Seen(give_in=torch.zeros(1, 3, 2)), module=layer.norm)
    assert torch.equal(hidden, torch.zeros(3, 2))
    assert torch.equal(residual, HIDDEN + RESIDUAL)


def test_parts_of_a_fused_module():
    """Each part has the whole input and its rows of the output; changing one leaves the other."""
    layer, first, second = Layer(), Seen(), Seen(give_out=torch.zeros(1, 3, 2))
    with contextlib.ExitStack() as stack:
        for seen, rows in ((first, slice(0, 2)), (second, slice(2, 4))):
            stack.enter_context(viewed(layer.fused, seen.before, seen.after, rows=rows))
        hidden, _ = layer(torch.arange(3), HIDDEN.clone(), None)
    assert torch.equal(first.given[0], HIDDEN[None] / 2)
    assert torch.equal(first.taken[0], HIDDEN[None] / 2 * 3)
    assert torch.equal(second.taken[0], HIDDEN[None] / 2 * 5)
    assert torch.equal(hidden, HIDDEN / 2 * 3)


def test_the_input_of_a_part_cannot_be_changed_alone():
    """The other parts would get it too."""
    layer = Layer()
    with pytest.raises(PlantError, match="in one with others"):
        run(layer, Seen(give_in=torch.zeros(1, 3, 2)), None, module=layer.fused, rows=slice(0, 2))


def test_hooks_are_off_afterwards():
    """Nothing is seen after the block of code."""
    layer, seen = Layer(), Seen()
    run(layer, seen, is_block=True)
    layer(torch.arange(3), HIDDEN, None)
    assert len(seen.given) == len(seen.taken) == 1


class Model(nn.Module):
    """What vLLM asks for logits beside the forward."""

    def compute_logits(self, hidden_states):
        return hidden_states @ torch.ones(2, 4)


def test_logits_are_shown_then_chosen_from():
    """The head's hooks, the root's, and last the choice, which the sampler gets."""
    model, head, root = Model(), Seen(), Seen()
    with head_hooked(
        model, head=(head.before, head.after), after_root=root.after, choose=lambda x: x * 0
    ):
        result = model.compute_logits(HIDDEN[:1])
    assert torch.equal(head.given[0], HIDDEN[None, :1])
    assert torch.equal(head.taken[0], torch.full((1, 1, 4), 3.0))
    assert torch.equal(root.taken[0], head.taken[0])
    assert torch.equal(result, torch.zeros(1, 4))
    assert torch.equal(model.compute_logits(HIDDEN[:1]), torch.full((1, 4), 3.0))


class Attention(nn.Module):
    def forward(self, positions, hidden_states):
        return hidden_states


def test_rows_of_a_rotary_table():
    """As transformers' module gives them: cosines and sines, both halves alike, for each token."""
    rotary = nn.Module()
    rotary.is_neox_style = True
    rotary.cos_sin_cache = torch.arange(20.0).reshape(5, 4)
    attention, taken = Attention(), []
    with table_viewed(attention, rotary, lambda *args: taken.append(args[3])):
        attention(torch.tensor([1, 3]), hidden_states=torch.zeros(2, 8, dtype=torch.bfloat16))
    cos, sin = taken[0]
    assert cos.dtype == torch.bfloat16
    assert cos.tolist() == [[[4, 5, 4, 5], [12, 13, 12, 13]]]
    assert sin.tolist() == [[[6, 7, 6, 7], [14, 15, 14, 15]]]
    rotary.is_neox_style = False
    with table_viewed(attention, rotary, lambda *args: taken.append(args[3])):
        attention(torch.tensor([1, 3]), torch.zeros(2, 8))
    assert len(taken) == 1, "a table of another form"


def test_a_rotary_table_cannot_be_planted():
    """Its rows are read where no hook is."""
    rotary, attention = nn.Module(), Attention()
    rotary.is_neox_style, rotary.cos_sin_cache = True, torch.zeros(5, 4)
    with (
        table_viewed(attention, rotary, lambda *args: args[3]),
        pytest.raises(PlantError, match="rotary table"),
    ):
        attention(torch.tensor([1]), torch.zeros(1, 8))
