"""Hooks see everything and change nothing."""

import pytest
import torch
from torch import nn

from divergence import capture
from divergence.errors import PlantError
from divergence.recording.plant import parse_plant
from divergence.recording.recorder import Recorder
from divergence.recording.structure import describe_modules

PROMPT = "The harbour was quiet in the early morning."


class Keeper:
    """A sink that keeps items by (step, site)."""

    def __init__(self) -> None:
        self.items: dict = {}
        self.positions: dict = {}

    def put(self, item, *, step, site, positions=None, **_) -> None:
        assert (step, site) not in self.items
        self.items[step, site] = item
        self.positions[step, site] = positions

    def tensor(self, site: str, step: int = 0) -> torch.Tensor:
        return self.items[step, site].tensor


def recorder_of(model: nn.Module, sink: Keeper, **options) -> Recorder:
    notes = describe_modules(model)
    return Recorder(model, notes, wanted=lambda *_: True, hooked=set(notes), sink=sink, **options)


def watch(model: nn.Module, *args, **options) -> Keeper:
    sink = Keeper()
    recorder = recorder_of(model, sink, **options)
    recorder.begin(sample=0, batch=1, num_tokens=0)
    with recorder.installed():
        model(*args)
    return sink


def num_hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@pytest.fixture
def loaded(tiny_model):
    """``loaded(architecture)`` → (model, token ids)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load(architecture: str, **options):
        folder = tiny_model(architecture, dtype="bfloat16")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()
        return model, AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")

    return load


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3-moe", "mamba"])
def test_hooks_change_no_bit(architecture, loaded):
    """The logits under hooks on every module are those without."""
    model, inputs = loaded(architecture)
    with torch.no_grad():
        plain = model(**inputs).logits
        sink = Keeper()
        recorder = recorder_of(model, sink)
        with recorder.installed():
            hooked = model(**inputs).logits
        again = model(**inputs).logits
    assert torch.equal(plain, hooked)
    assert torch.equal(plain, again)
    assert torch.equal(sink.tensor(".:out"), plain)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_hooks_are_removed_whatever_happens(error, loaded):
    """After a normal end, an exception or Ctrl-C, no hook is left."""
    model, inputs = loaded("llama")
    recorder = recorder_of(model, Keeper())
    with torch.no_grad():
        try:
            with recorder.installed():
                assert num_hooks(model) > 20
                model(**inputs)
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
    assert num_hooks(model) == 0


class Overwriting(nn.Module):
    """Writes to its input, and the model to its output, after the hooks have seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        y = self.inner(x)
        x.mul_(100)
        return y


def test_writes_in_place_do_not_reach_the_record():
    """What a hook saw is what is recorded, though the tensor changes afterwards."""
    x = torch.arange(6.0).reshape(2, 3)
    sink = watch(Overwriting(), x.clone())
    assert torch.equal(sink.tensor("inner:in"), x)
    assert torch.equal(sink.tensor("inner:out"), x)
    assert torch.equal(sink.tensor(".:out"), 100 * x)


def test_a_tensor_that_passes_through_is_copied_once():
    """The same tensor at several sites is one item, until something writes to it, or may have:
    a module that returns what it was given could have used a kernel that leaves no trace."""
    sink = watch(Overwriting(), torch.ones(2, 3))
    assert sink.items[0, "inner:in"] is sink.items[0, ".:in"]
    assert sink.items[0, "inner:in"] is not sink.items[0, "inner:out"]
    assert sink.items[0, ".:out"] is not sink.items[0, "inner:out"]


class Untracked(nn.Module):
    """Overwrites its input the way a fused kernel does: past torch's version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.forward = self._overwrite

    @staticmethod
    def _overwrite(x):
        x.data.add_(1)
        return x

    def forward(self, x):
        return self.inner(x)


def test_an_untracked_write_of_a_returned_input_is_seen():
    """The output is recorded as it is, not as the input was."""
    sink = watch(Untracked(), torch.zeros(2, 3))
    assert torch.equal(sink.tensor("inner:in"), torch.zeros(2, 3))
    assert torch.equal(sink.tensor("inner:out"), torch.ones(2, 3))


class Twice(nn.Module):
    """One module called twice, and one asked for by name in an order that may vary."""

    def __init__(self, order: tuple[str, str]) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.table = Table()
        self.order = order

    def forward(self, x):
        for kind in self.order:
            x = x + self.table(torch.ones(3), kind)
        return self.shared(self.shared(x))


class Table(nn.Module):
    def forward(self, x, kind: str):
        return x * {"full": 1.0, "sliding": 2.0}[kind]


def test_calls_are_told_apart():
    """A second call is #2; calls asked for by a word carry the word, in whatever order."""
    torch.manual_seed(0)
    one = watch(Twice(("full", "sliding")), torch.ones(3))
    torch.manual_seed(0)
    two = watch(Twice(("sliding", "full")), torch.ones(3))
    assert one.items.keys() == two.items.keys()
    sites = {site for _, site in one.items}
    assert {"shared:out", "shared#2:out", "table#full:out", "table#sliding:out"} <= sites
    for site in ("table#full:out", "table#sliding:out"):
        assert torch.equal(one.tensor(site), two.tensor(site))


def test_modules_are_recorded_with_equal_tensors_once(captured):
    """--sites modules keeps every input and output, and stores what is equal once."""
    run = captured("llama", capture_options={"sites": ["modules"]})
    sites = set(run.sites())
    assert {
        "model.layers.1.mlp.act_fn:in",
        "model.layers.1.mlp.act_fn:out",
        "model.layers.1.self_attn.q_proj:in",
        "model.layers.1:in",
        "model.embed_tokens:in",
    } <= sites
    at = {r.site: r for r in run.records if r.step == 0}
    same = [at[f"model.layers.1.self_attn.{name}_proj:in"].place for name in "qkv"]
    assert len({(place.shard, place.key) for place in same}) == 1
    sizes = run.manifest.sizes
    assert sizes.num_tensors == len({(r.place.shard, r.place.key) for r in run.records})
    assert sizes.num_tensors < 0.7 * sizes.num_records
    assert sizes.stored_bytes < sizes.seen_bytes


@pytest.mark.slow
def test_steps_select_forwards(captured):
    """Only the chosen forwards are kept."""
    for spec, steps in (("prefill", {0}), ("decode", {1, 2, 3}), ("0,2-3", {0, 2, 3})):
        run = captured("llama", capture_options={"steps": spec})
        assert {r.step for r in run.records} == steps


@pytest.mark.slow
def test_positions_select_tokens_of_the_prompt(captured):
    """Only the chosen tokens are kept, and the record says which."""
    whole = captured("llama")
    count = len(whole.manifest.tokens.samples[0].prompt_ids)
    for spec, places in (
        ("last:2", (count - 2, count - 1)),
        ("0,3-4", (0, 3, 4)),
        ("-1", (count - 1,)),
    ):
        run = captured("llama", capture_options={"positions": spec})
        for site in ("model.layers.0:in", "model.norm:out"):
            few, all_ = (r.find(("free", 0, 0, site)) for r in (run, whole))
            assert few.positions == places
            assert torch.equal(run.read(few), whole.read(all_)[:, list(places)])
        later = run.find(("free", 0, 1, "model.layers.0:out"))
        assert later.positions is None
        assert later.shape[1] == 1


def test_the_anchored_pass_starts_each_block_from_the_record(captured, replay):
    """After a fault in block 0, block 1 gets the reference's input in the anchored pass alone."""
    run = captured("llama")
    other = replay(run, plants=["model.layers.0:out=scale:1.5"])

    def out(of, pass_, block):
        return of.read(of.find((pass_, 0, 0, f"model.layers.{block}:out")))

    assert torch.equal(out(other, "anchored", 1), out(run, "free", 1))
    assert not torch.equal(out(other, "free", 1), out(run, "free", 1))
    assert not torch.equal(out(other, "anchored", 0), out(run, "free", 0))
    inputs = [r for r in other.records if r.pass_ == "anchored" and r.site.endswith("layers.1:in")]
    assert inputs == []  # replaced inputs are the other run's, not news of this one


# --- plants ------------------------------------------------------------------------------------

X = torch.tensor([[[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]])
RMS = float(X.square().mean().sqrt())


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("scale:1.5", 1.5 * X),
        ("bias:0.5", X + 0.5 * RMS),
        ("channel:1:2", X * torch.tensor([1.0, 2.0, 1.0])),
        ("zero", 0 * X),
        ("zero:0-1", X * torch.tensor([0.0, 0.0, 1.0])),
        ("zero:2", X * torch.tensor([1.0, 1.0, 0.0])),
        ("roll", X.flip(1)),
        ("roll:2", X),
        ("cast:float8_e5m2", X.to(torch.float8_e5m2).float()),
        ("cast:int8", (X * 127 / 6).round() * 6 / 127),
    ],
)
def test_faults_do_what_they_say(fault, wanted):
    """Each kind of fault against its definition; the tensor it is given stays as it was."""
    before = X.clone()
    found = parse_plant(f"a:out={fault}").apply(X, 0)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(X, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_reproducible_and_of_its_size(dtype):
    """The same fault in the same forward is the same; another forward or seed draws anew."""
    x = torch.linspace(-3, 3, 20_000).to(dtype)
    plant, other = parse_plant("a:out=noise:0.2"), parse_plant("a:out=noise:0.2:7")
    once = plant.apply(x, 3)
    assert once.dtype == dtype
    assert torch.equal(once, plant.apply(x, 3))
    assert not torch.equal(once, plant.apply(x, 4))
    assert not torch.equal(once, other.apply(x, 3))
    made = (once.double() - x.double()).square().mean().sqrt()
    assert made / x.double().square().mean().sqrt() == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize(("fault", "value"), [("nan:3", float("nan")), ("inf:3", float("inf"))])
def test_pokes_change_one_element(fault, value):
    """One element becomes nan or inf, all others stay."""
    found = parse_plant(f"a:out={fault}").apply(X, 0)
    changed = found != X
    assert changed.sum() == 1
    torch.testing.assert_close(found.flatten()[3], torch.tensor(value), equal_nan=True)


def test_casting_below_saturates():
    """A float8 cast of a large value gives its largest, as accelerators do, not nan."""
    found = parse_plant("a:out=cast:float8_e4m3fn").apply(torch.tensor([1e6, -1e6]), 0)
    assert found.tolist() == [448.0, -448.0]


@pytest.mark.parametrize(
    "text",
    """
        model.norm:out a:out= a:out=scal:2 a:out=scale:x a:out=scale a=scale:2 a:out=channel:1
        a:out=cast:nothing a:out=scale:2@sample a:out=scale:2@step=1,step=2 a:out=scale:2@head=3
    """.split(),
)
def test_faults_that_cannot_be_understood_are_refused(text):
    """A PlantError shows how faults are written."""
    with pytest.raises(PlantError) as caught:
        parse_plant(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        ("model.layers.9:out=scale:2", "no module"),
        ("model.layers.1:out.7=scale:2", "never planted"),
        ("model.layers.1:out=channel:999:2", "999"),
        ("model.layers.1:out=zero:0-999", "999"),
        ("model.embed_tokens:in=scale:2", "not floating point"),
        ("model.layers.1:out=scale:2@sample=4", "never planted"),
    ],
)
def test_a_fault_that_meets_no_tensor_is_an_error(plant, told, llama, tmp_path):
    """A plant that changes nothing proves nothing."""
    with pytest.raises(PlantError, match=told):
        capture(
            str(llama), out=tmp_path / "run", prompts=[PROMPT], max_new_tokens=1, plants=[plant]
        )


def test_a_fault_can_be_limited_to_one_prompt_and_step(tmp_path, shared_run):
    """``@sample=1,step=2`` leaves every other forward as it was."""
    a = shared_run(prompts=[PROMPT, "two"], max_new_tokens=3)
    b = capture(like=a, out=tmp_path / "b", plants=["model.layers.1:out=scale:2@sample=1,step=2"])
    site = "model.layers.1:out"
    other = {
        (sample, step)
        for sample in (0, 1)
        for step in (0, 1, 2)
        if not torch.equal(
            a.read(a.find(("free", sample, step, site))),
            b.read(b.find(("free", sample, step, site))),
        )
    }
    assert other == {(1, 2)}


def test_a_fault_at_an_input_is_planted_before_the_module_sees_it(captured, replay):
    """:in faults change what the module computes, not what came before it."""
    run = captured("llama")
    other = replay(run, plants=["model.layers.1:in=scale:2"], anchor=False)

    def get(of, site):
        return of.read(of.find(("free", 0, 0, site)))

    assert torch.equal(get(other, "model.layers.0:out"), get(run, "model.layers.0:out"))
    assert torch.equal(get(other, "model.layers.1:in"), 2 * get(run, "model.layers.1:in"))
    assert not torch.equal(get(other, "model.layers.1:out"), get(run, "model.layers.1:out"))


def test_plants_are_recorded(captured, replay):
    """Nobody mistakes a run with a fault for a healthy one."""
    other = replay(captured("llama"), plants=["model.norm:out=scale:2"])
    assert other.manifest.plan.plants == ["model.norm:out=scale:2"]
