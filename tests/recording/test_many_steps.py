"""Decode steps of a truth that are made together are what they are one by one."""

import json

import pytest
import torch

from divergence import LoadOptions, capture
from divergence import truth as make_truth
from divergence.recording.engines import many_steps
from divergence.recording.engines.many_steps import Rows, agree

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "def mean"]


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """How many steps each try made together."""
    found: list[int] = []
    real = many_steps._make_many

    def counted(*args):
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(many_steps, "_make_many", counted)
    return found


@pytest.fixture
def both_ways(tiny_model, tmp_path, monkeypatch, made):
    """``both_ways(architecture, **options)`` → (the truth, the truth made step by step, tries)."""

    def make(architecture, *, dtype="bfloat16", config=None, **options):
        options = {"prompts": PROMPTS, "max_new_tokens": 10, "probe": False} | options
        remote = architecture == "remote-code"
        model = tiny_model(architecture, dtype=dtype)
        if config is not None:
            copied = tmp_path / "model"
            copied.mkdir()
            for file in model.iterdir():
                (copied / file.name).write_bytes(file.read_bytes())
            values = json.loads((copied / "config.json").read_text()) | config
            (copied / "config.json").write_text(json.dumps(values))
            model = copied
        run = capture(
            str(model),
            out=tmp_path / "run",
            loading=LoadOptions(trust_remote_code=remote),
            **options,
        )
        truth = make_truth(run, out=tmp_path / "truth", trust_remote_code=remote)
        tries = list(made)
        monkeypatch.setattr(many_steps, "FEWEST_STEPS", 1 << 30)
        alone = make_truth(run, out=tmp_path / "alone", trust_remote_code=remote)
        assert made == tries
        return truth, alone, tries

    return make


def place(record):
    return record.order, record.shape, record.dtype, record.positions, record.call


def assert_same(truth, alone) -> int:
    """All but the last digits are the same; returns how many records differ in those."""
    ours = {record.coordinates: record for record in truth.records}
    theirs = {record.coordinates: record for record in alone.records}
    assert {key: place(one) for key, one in ours.items()} == {
        key: place(one) for key, one in theirs.items()
    }
    num_rounded = 0
    for key, one in ours.items():
        if one.xxh3 != theirs[key].xxh3:
            num_rounded += 1
            a, b = truth.read(one), alone.read(theirs[key])
            assert float((a - b).norm() / b.norm()) < 1e-13, key
    for name in ("samples", "groups", "texts"):
        assert getattr(truth.manifest.tokens, name) == getattr(alone.manifest.tokens, name)
    return num_rounded


def some_slow(cases, num_fast):
    """The first are run every time, the others by make test-slow."""
    slow = (pytest.param(*case, marks=pytest.mark.slow) for case in cases[num_fast:])
    return [*cases[:num_fast], *slow]


TOGETHER = [
    ("llama", {}),
    ("llama", {"sites": ["modules"]}),
    ("llama", {"batch": True, "max_new_tokens": 40, "attn_implementation": "sdpa"}),
    ("llama", {"positions": "last:3"}),
    ("qwen3", {"sites": ["modules"], "attn_implementation": "sdpa", "batch": True}),
    ("gpt2", {"sites": ["modules"], "batch": True}),
    ("qwen3-moe", {"batch": True}),
    ("mixtral", {}),
    ("gemma3", {"batch": True}),  # windows of 16 tokens, prompts beyond
    ("remote-code", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "options"), some_slow(TOGETHER, 3))
def test_steps_made_together_are_the_steps(architecture, options, both_ways):
    """Sites, order, shapes and dtypes are those of the steps one by one, values but for float64's
    rounding; pads, windows, routing, keys and masks that grow, and logits included."""
    truth, alone, tries = both_ways(architecture, **options)
    num_steps = options.get("max_new_tokens", 10) - 1
    num_groups = len(truth.manifest.tokens.groups) * len(truth.manifest.plan.passes)
    assert sum(tries) == num_steps * num_groups
    assert 0 not in tries
    assert assert_same(truth, alone) > 0


def rope(kind, **values):
    """Rotary tables of this kind, as transformers 5 and 4 call them."""
    values = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0} | values
    return {"rope_parameters": values, "rope_scaling": values}


ONE_BY_ONE = [
    # a state instead of keys and values: not tried
    ("mamba", {}, []),
    ("t5", {}, []),
    # an encoder makes no steps
    ("bert", {}, []),
    # experts get as many rows as were sent there
    ("qwen3-moe", {"sites": ["modules"]}, [0]),
    # keys of a full window do not grow
    ("gemma3", {"sites": ["modules"]}, [0]),
    # steps that were not recorded, or not all
    ("llama", {"steps": "prefill"}, [0]),
    ("llama", {"steps": "0,1-4"}, [0]),
    # the frequencies follow the length, and the model remembers the longest
    ("llama", {"config": rope("dynamic") | {"max_position_embeddings": 32}}, [0]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "options", "tries"), some_slow(ONE_BY_ONE, 3))
def test_what_does_not_fit_is_made_one_by_one(architecture, options, tries, both_ways):
    """It is not tried, or tried once and taken back: the truth is the same, bit for bit."""
    truth, alone, found = both_ways(architecture, **options)
    assert found == tries
    assert assert_same(truth, alone) == 0


@pytest.mark.parametrize(("limit", "tries"), [(37, [0]), (30, [9, 9]), (60, [9, 9])])
def test_tables_that_change_with_the_length_are_seen(limit, tries, both_ways):
    """Frequencies that are others beyond so many tokens: met while decoding, before it or never.
    The prompt has 33."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = rope("longrope", original_max_position_embeddings=limit, **factors)
    config |= {"original_max_position_embeddings": limit}
    truth, alone, found = both_ways("llama", config=config, prompts=PROMPTS[:1])
    assert len(truth.manifest.tokens.samples[0].prompt_ids) == 33
    assert found == tries
    assert_same(truth, alone)


@pytest.mark.slow
def test_progress_counts_every_step(tmp_path, shared_run):
    """Blocks of steps that are made together are told as often as those of steps one by one."""
    told: dict[str, list] = {"free": [], "anchored": []}

    def progress(event, done, total, detail):
        if event in told and total is not None:
            told[event].append((done, total, detail))

    run = shared_run(model={"num_blocks": 2}, prompts=PROMPTS[:1], max_new_tokens=10)
    make_truth(run, out=tmp_path / "truth", progress=progress)
    blocks = [f"model.layers.{number}" for number in range(2)]
    for steps in told.values():
        assert [(done, total) for done, total, _ in steps] == [(n, 20) for n in range(1, 21)]
        assert sorted(detail for _, _, detail in steps) == sorted(10 * blocks)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_model_that_decodes_otherwise_is_seen(where, both_ways, monkeypatch):
    """A forward of several rows that is off by 2^-20 in one of them: nothing of it is recorded."""
    from transformers.models.llama import modeling_llama

    real = modeling_llama.LlamaMLP.forward

    def forward(self, x):
        out = real(self, x)
        if x.shape[1] == 9:
            out[:, 0 if where == "first" else -1] *= 1 + 2**-20
        return out

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    truth, alone, tries = both_ways("llama", prompts=PROMPTS[:1])
    assert tries == [0]
    assert assert_same(truth, alone) == 0


@pytest.mark.slow
def test_what_is_held_is_bounded(both_ways, monkeypatch):
    """Fewer steps go together where one gives many bytes; where too few fit, none."""
    monkeypatch.setattr(many_steps, "HELD_BYTES", 100_000)
    truth, alone, tries = both_ways("llama", prompts=PROMPTS[:1], max_new_tokens=40)
    assert 6 <= max(tries) < 32
    assert_same(truth, alone)


# --- cutting -------------------------------------------------------------------------------------


def cut(whole, first, last, *, count=3, batch=2, past=5):
    rows = Rows(count, batch=batch, past=past)
    found = rows.cut({"a": whole}, {"a": first}, {"a": last})
    return None if found is None else [step["a"] for step in found]


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((2, 3, 4), lambda t, n: t[:, n : n + 1]),
        ((2, 3, 3), lambda t, n: t[:, n : n + 1]),
        ((3,), lambda t, n: t[n : n + 1]),
        ((2, 4, 3, 8), lambda t, n: t[:, :, n : n + 1, : 6 + n]),  # keys grow
        ((6, 4), lambda t, n: t.reshape(2, 3, 4)[:, n]),  # rows of the whole batch
        ((4, 7), lambda t, n: t),  # of no token
    ],
)
def test_rows_are_cut_by_what_a_step_alone_gives(shape, pieces):
    """Every place of the token axis, told apart by the first step's shape."""
    whole = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    expected = [pieces(whole, number) for number in range(3)]
    found = cut(whole, expected[0], expected[-1])
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_differs_is_not_cut():
    """Other values, shapes, dtypes or sites at either end."""
    whole = torch.rand(2, 3, 4, dtype=torch.float64) + 1
    first, last = whole[:, :1], whole[:, 2:]
    assert cut(whole, first * (1 + 1e-12), last) is not None
    assert cut(whole, first * (1 + 1e-8), last) is None
    assert cut(whole, first, last * (1 + 1e-8)) is None
    assert cut(whole, first, last.float()) is None
    assert cut(whole, first[..., :2], last) is None
    rows = Rows(3, batch=2, past=5)
    assert rows.cut({"a": whole, "mask": whole}, {"a": first}, {"a": last}) is not None
    assert rows.cut({"a": whole}, {"a": first, "b": first}, {"a": last, "b": last}) is None
    assert rows.cut({"a": whole}, {"a": first}, {"a": last, "b": last}) is None
    order = {"b": whole, "a": whole}
    ends = [{"a": one, "b": one} for one in (first, last)]
    assert rows.cut(order, *ends) is None


def test_agreement_is_of_float64_alone():
    """Integers and narrower numbers must have the same bits; nan agrees with nothing but itself."""
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert agree(one, one + 1e-12)
    assert not agree(one, one + 1e-6)
    assert not agree(one.float(), one.float() + 1e-6)
    assert not agree(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not agree(one, torch.tensor([1.0, torch.nan], dtype=torch.float64))
    masked = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    assert agree(masked, masked.clone())


def test_recorded_rows_anchor_one_forward():
    """Rows of all steps one after another; where some are missing, or are no rows, it is noted."""
    held = {n: torch.full((1, 1, 2), float(n)) for n in (4, 5, 6)}
    own = torch.zeros(1, 3, 2)
    rows = Rows(3, batch=1, past=9)
    together_at = rows.of(lambda sample, step, site, own: held.get(step))
    found = together_at(0, 4, "a:in", own)
    assert found is not None
    assert found[0, :, 0].tolist() == [4, 5, 6]
    assert together_at(0, 90, "a:in", own) is None  # in no step: as without a record
    assert rows.anchored
    assert together_at(0, 5, "a:in", own) is None
    assert not rows.anchored
