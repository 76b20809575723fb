"""record(): runs of any module; what differs is found, what is equal is equal."""

import contextlib
import copy
import dataclasses
import io
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from divergence import Run, capture, compare, record
from divergence.errors import IncomparableError, RunExistsError, UsageError


class Tower(nn.Module):
    """Four blocks of two products, as vision and speech models have them."""

    def __init__(self, *, wrong=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(4)
        )
        self.wrong = wrong

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x + block(x) * (1.1 if number == self.wrong else 1.0)
        return x


def _recorded(module, out, *, num=3, **options):
    torch.manual_seed(1)
    with record(module, out=out, **options) as recording:
        for _ in range(num):
            assert recording.step(torch.randn(1, 12, 32)).shape == (1, 12, 32)
        assert recording.num_steps == num
    return Run.open(out)


def test_the_same_module_twice_is_equal(tmp_path):
    """A module of one's own is recorded step by step, and repeats itself."""
    a, b = (_recorded(Tower(), tmp_path / name) for name in "ab")
    assert a.manifest.complete and len(a.manifest.tokens.samples) == 3
    assert {record.site for record in a.records} >= {
        ".:in",
        ".:out",
        "blocks.1:out",
        "blocks.1.1:in",
    }
    report = compare(a, b)
    assert report.verdict.kind == "identical"


def test_a_fault_is_found_where_it_is_made(tmp_path):
    """Behind the block whose code is another."""
    a = _recorded(Tower(), tmp_path / "a", label="A")
    b = _recorded(Tower(wrong=2), tmp_path / "b", label="B")
    report = compare(a, b)
    assert report.verdict.kind in ("localized", "systematic", "drift")
    first = next(site for site in report.sites if not site.identical)
    assert first.site.startswith("blocks.3")  # block 2 gets and gives what it should


def test_other_weights_stop_the_comparison(tmp_path):
    """As those of a model do."""
    other = Tower()
    nn.init.zeros_(other.blocks[0][1].weight)
    runs = _recorded(Tower(), tmp_path / "a"), _recorded(other, tmp_path / "b")
    assert compare(*runs).verdict.kind == "incomparable"


def test_what_cannot_be_recorded_is_refused(tmp_path):
    """What is no module, or made no step, or would replace a run."""
    with (
        pytest.raises(UsageError, match=r"no torch\.nn\.Module"),
        record(print, out=tmp_path / "x"),
    ):
        pass
    with pytest.raises(UsageError, match="no step was made"), record(Tower(), out=tmp_path / "y"):
        pass
    _recorded(Tower(), tmp_path / "z", num=1)
    with pytest.raises(RunExistsError), record(Tower(), out=tmp_path / "z"):
        pass


def test_a_block_that_raises_leaves_a_readable_run(tmp_path):
    """It is incomplete, and holds what was recorded."""
    with pytest.raises(ZeroDivisionError), record(Tower(), out=tmp_path / "a") as recording:
        recording.step(torch.ones(1, 2, 32))
        raise ZeroDivisionError
    run = Run.open(tmp_path / "a")
    assert not run.manifest.complete and run.records


def test_a_step_that_raised_and_is_made_again_is_one_step(tmp_path):
    """As for want of memory: what its first forward gave is of no step."""

    calls = []

    class Raising(Tower):
        def forward(self, x):
            y = super().forward(x)
            calls.append(x)
            if len(calls) == 3:  # behind both passes of the first step
                raise MemoryError
            return y

    a, module = _recorded(Tower(), tmp_path / "a"), Raising()
    torch.manual_seed(1)
    with record(module, out=tmp_path / "b", like=a) as recording:
        for number in range(3):
            x = torch.randn(1, 12, 32)
            if number == 1:
                with pytest.raises(MemoryError):
                    recording.step(x)
                with pytest.raises(UsageError, match="is not what"):
                    recording.step(x + 1)
            recording.step(x)
    assert compare(a, tmp_path / "b").verdict.kind == "identical"


def test_a_step_that_raised_and_is_not_made_again_stays(tmp_path):
    """Who skips an input that fails has it in the run, as far as it came."""

    class Raising(Tower):
        def forward(self, x):
            y = super().forward(x)
            if x.isnan().any():
                raise ValueError
            return y

    inputs = [torch.randn(1, 12, 32) for _ in range(3)]
    inputs[1][0, 3] = torch.nan
    with record(Tower(), out=tmp_path / "a") as recording:
        for x in inputs:
            recording.step(x)
    for like in (None, tmp_path / "a"):
        with record(Raising(), out=tmp_path / "b", like=like, force=True) as recording:
            for x in inputs:
                with contextlib.suppress(ValueError):
                    recording.step(x)
        report = compare(tmp_path / "a", tmp_path / "b")
        assert report.verdict.kind != "incomparable"
        assert {site.sample for site in report.sites} == {0, 1, 2}


def test_lists_and_dicts_of_tensors_are_given_again(tmp_path):
    """As deep as they lie, with the plain values among them."""

    class Deep(Tower):
        def forward(self, batch, *, masks):
            return super().forward(batch["x"] * masks[0][0] + batch["more"]["y"])

    a, b = tmp_path / "a", tmp_path / "b"
    with record(Deep(), out=a) as recording:
        more = {"y": torch.randn(1, 2, 32), "none": None}
        recording.step({"x": torch.randn(1, 2, 32), "more": more}, masks=[(torch.ones(32), 3)])
    with record(Deep(), out=b, like=a) as recording:
        recording.repeat()
    assert compare(a, b).verdict.kind == "identical"
    assert Run.open(b).manifest.tokens == Run.open(a).manifest.tokens


def test_capture_takes_a_module_and_its_inputs(tmp_path):
    """One step for each input, given as a tensor, as arguments or by name."""
    torch.manual_seed(1)
    x = torch.randn(1, 12, 32)
    runs = [
        capture(Tower(wrong=wrong), inputs=[x, (x,), {"x": x}], out=tmp_path / name)
        for name, wrong in (("a", None), ("b", None), ("c", 1))
    ]
    assert len(runs[0].manifest.tokens.samples) == 3
    assert compare(runs[0], runs[1]).verdict.kind == "identical"
    report = compare(runs[0], runs[2])
    first = next(site for site in report.sites if not site.identical)
    assert first.site.startswith("blocks.2")


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (Tower, {}, "needs inputs"),
        (Tower, {"inputs": torch.zeros(1, 2, 32)}, "needs inputs"),
        (Tower, {"inputs": [torch.zeros(1, 2, 32)], "dtype": "bfloat16"}, "dtype: a module"),
        (Tower, {"inputs": [torch.zeros(1, 2, 32)], "like": "a"}, "like: a module"),
        (lambda: "model", {"inputs": [torch.zeros(1, 2, 32)]}, "the model is str"),
        (object, {}, "the model is object"),
    ],
)
def test_what_a_module_cannot_follow_is_refused(tmp_path, model, options, said):
    """Options of language models mean nothing to it."""
    with pytest.raises(UsageError, match=said):
        capture(model(), out=tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def _repeated(module, like, out):
    with record(module, out=out, like=like) as recording:
        recording.repeat()
    return Run.open(out)


class Two(nn.Module):
    """Blocks behind two inputs, of which the second is given by name or by place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, scale=None, shift=None, flag=True):
        x = x * scale + (0 if shift is None else shift)
        for block in self.blocks:
            x = block(x) if flag else x
        return x


def test_a_run_is_repeated_with_its_inputs_and_anchored(tmp_path, invoke):
    """What is equal is told with confidence, and what is printed leads to such a repetition."""
    a = _recorded(Tower(), tmp_path / "a", label="A")
    same = compare(a, _repeated(Tower(), a, tmp_path / "same"))
    assert (same.verdict.kind, same.verdict.confidence) == ("identical", "high")
    assert Run.open(tmp_path / "same").manifest.plan.passes == ["free", "anchored"]
    shown = invoke("inspect", tmp_path / "a")[1]
    assert "with divergence.record(module, out='OTHER', like=" in shown
    assert "capture --like" not in shown.rpartition("next")[2]
    code, _, err = invoke("capture", "--like", tmp_path / "a", "-o", tmp_path / "no")
    assert code == 2 and "divergence.record(module, out=..., like=RUN)" in err


def test_a_wrong_block_is_named_by_a_repeated_run(tmp_path):
    """Its inputs were A's, so its error was made there; a run by itself says what it lacks."""
    a = _recorded(Tower(), tmp_path / "a")
    broken = Tower()
    broken.blocks[2][1].register_forward_hook(lambda module, args, output: output * 1.05)
    verdict = compare(a, _repeated(broken, a, tmp_path / "b")).verdict
    assert (verdict.kind, verdict.onset.block) == ("localized", "blocks.2")
    assert verdict.confidence == "high"
    free = compare(a, _recorded(broken, tmp_path / "free")).verdict
    lacking = " ".join(item.detail for item in free.checks)
    assert "B's blocks did not get A's inputs (record(module, like=A) in Python)" in lacking
    assert "capture --like" not in lacking and free.confidence == "low"


def test_inputs_by_name_and_by_place_are_given_again(tmp_path):
    """A repeated run gets each input as it was given."""
    x, scale, shift = torch.randn(2, 8), torch.tensor(2.0), torch.ones(8)
    with record(Two(), out=tmp_path / "a") as recording:
        recording.step(x, scale)
        recording.step(x, shift=shift, scale=scale)
        recording.step(x, scale, None, flag=False)
    a = Run.open(tmp_path / "a")
    samples = a.manifest.tokens.samples
    assert [s.inputs for s in samples] == [["0", "1"], ["0", "shift", "scale"], ["0", "1"]]
    assert samples[2].constants == {"2": None, "flag": False}
    assert compare(a, _repeated(Two(), a, tmp_path / "b")).verdict.kind == "identical"


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"scale": 3.0}, "incomparable", "step 0 was given something else: scale 2.0 / 3.0"),
        ({"shift": torch.ones(8)}, "incomparable", "step 0 was given something else: in.shift"),
        ({"x": 1.5}, "incomparable", "step 0 was given something else: in"),
        ({"x": 1 + 1e-6}, "within_floor", "only rounding differs"),
    ],
)
def test_steps_of_other_inputs_are_another_experiment(tmp_path, given, kind, said):
    """Whatever the modules make of them; but inputs that only rounding parts are compared."""
    x = torch.randn(2, 8)
    for name, values in (("a", {}), ("b", given)):
        call = {"x": x, "scale": 2.0, **values}
        call["x"] = x * values.get("x", 1.0)
        with record(Two(), out=tmp_path / name) as recording:
            recording.step(**call)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.verdict.kind == kind and said in report.verdict.summary
    line = next(line for line in report.preflight if line.check == "inputs")
    assert line.status == ("blocking" if kind == "incomparable" else "differs")


def test_what_a_module_holds_and_how_it_is_set_is_named(tmp_path, llama):
    """A recorded model tells its attention, its numbers, and that it was left in training mode."""
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokens = torch.tensor([[1, 5, 9, 20]])
    with record(model, out=tmp_path / "a") as recording:
        recording.step(tokens, use_cache=False)
    other = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="sdpa").train()
    other.model.norm.variance_epsilon = 0.5
    report = compare(tmp_path / "a", _repeated(other, Run.open(tmp_path / "a"), tmp_path / "b"))
    lines = {line.check: line for line in report.preflight}
    assert (lines["attention"].reference, lines["attention"].candidate) == ("eager", "sdpa")
    assert "training false / true" in str(lines["config"].detail)
    assert "variance_epsilon" in str(lines["code"].detail)


@pytest.mark.slow
def test_a_loop_with_a_cache_is_repeated(tmp_path, llama):
    """The anchored forward gets the cache as the first forward got it."""
    model = AutoModelForCausalLM.from_pretrained(llama)

    def generate(name, **options):
        tokens, cache = torch.tensor([[1, 5, 9, 20]]), DynamicCache()
        with record(model, out=tmp_path / name, **options) as recording:
            for _ in range(3):
                output = recording.step(tokens, past_key_values=cache, use_cache=True)
                tokens = output.logits[:, -1:].argmax(-1)
        return Run.open(tmp_path / name)

    a = generate("a")
    report = compare(a, generate("b", like=a))
    assert (report.verdict.kind, report.coverage.num_only_reference) == ("identical", 0)


def test_other_inputs_and_what_cannot_be_repeated_are_refused(tmp_path, llama):
    """A step that is not the recorded one is an error, and the run goes on."""
    x, scale = torch.randn(2, 8), torch.tensor(2.0)
    with record(Two(), out=tmp_path / "a") as recording:
        recording.step(x, scale, flag={1})
    with record(Two(), out=tmp_path / "b", like=tmp_path / "a") as recording:
        with pytest.raises(UsageError, match="holds no inputs of step 0"):
            recording.repeat()
        with pytest.raises(UsageError, match="is not what"):
            recording.step(x + 1, scale, flag={1})
        with pytest.raises(UsageError, match=r"in\.shift is not what"):
            recording.step(x, scale, shift=scale, flag={1})
        recording.step(x, scale, flag={1})
        with pytest.raises(UsageError, match="has 1 steps"):
            recording.step(x, scale, flag={1})
    with pytest.raises(UsageError, match="block has ended"):
        recording.step(x, scale)
    assert compare(tmp_path / "a", tmp_path / "b").verdict.kind == "identical"
    with (
        pytest.raises(UsageError, match="no run to repeat"),
        record(Two(), out=tmp_path / "c") as recording,
    ):
        recording.repeat()
    prompts = capture(llama, out=tmp_path / "p", prompts=["Snow"], max_new_tokens=1, probe=False)
    with (
        pytest.raises(UsageError, match="capture --like repeats it"),
        record(Two(), out=tmp_path / "d", like=prompts),
    ):
        pass
    tower = _recorded(Tower(), tmp_path / "t")
    with pytest.raises(UsageError, match=r"other names \(blocks\.0, here 0\.blocks\.0\)"):
        _recorded(nn.Sequential(Tower()), tmp_path / "e", like=tower)


def test_an_argument_that_cannot_be_copied_is_handed_on(tmp_path):
    """A lock is no cache that the first forward writes to."""

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, lock):
            with lock:
                for layer in self.layers:
                    x = layer(x)
            return x

    module = Blocks()
    for name, options in (("a", {}), ("b", {"like": tmp_path / "a"})):
        with record(module, out=tmp_path / name, **options) as recording:
            recording.step(torch.ones(1, 4), threading.Lock())
    assert compare(tmp_path / "a", tmp_path / "b").verdict.kind == "identical"


@pytest.mark.slow
def test_a_wrong_block_of_a_loop_with_a_cache_is_named(tmp_path, llama):
    """The anchored pass goes on with a cache of its own, as A's keys and values filled it; calls of
    the module itself are steps."""

    def looped(out, factor=1.0, **options):
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _m, _a, out: factor * out)
        with record(model, out=out, **options):
            model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
        assert type(model) is type(AutoModelForCausalLM.from_config(model.config))
        return Run.open(out)

    a = looped(tmp_path / "a")
    assert len(a.manifest.tokens.samples) == 4
    report = compare(a, looped(tmp_path / "b", 1.01, like=a))
    assert report.verdict.kind == "localized"
    assert "model.layers.0.mlp.down_proj:out" in report.verdict.summary


def test_a_training_loop_keeps_its_gradients(tmp_path):
    """In training mode a step is what the loop would have done; the anchored pass is without."""
    tower = Tower()
    for out, like in (("a", None), ("b", tmp_path / "a")):
        with record(tower, out=tmp_path / out, like=like):
            tower(torch.ones(1, 12, 32)).sum().backward()
    assert tower.blocks[0][1].weight.grad is not None
    assert compare(tmp_path / "a", tmp_path / "b").verdict.kind == "identical"


def test_a_copy_of_a_recorded_module_is_its_own(tmp_path):
    """As an average of weights is, or what is saved for later: no step, in the block or after."""
    module, given = torch.nn.Linear(4, 4).eval(), torch.ones(1, 4)
    with record(module, out=tmp_path / "a"):
        usual, other, saved = module(given), copy.deepcopy(module), io.BytesIO()
        torch.save(module, saved)
        with torch.no_grad():
            other.weight.zero_()
        assert torch.equal(other(given)[0], other.bias) and type(module) is torch.nn.Linear
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False)(given), usual)
    assert torch.equal(other(given)[0], other.bias)
    assert len(Run.open(tmp_path / "a").manifest.tokens.samples) == 1


class Remembering(nn.Module):
    """Blocks with statistics of batches, dropout, and keys that they keep from step to step."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.BatchNorm1d(12), nn.Linear(32, 32)
            self.drop = nn.Dropout(0.3)
            self.register_buffer("kept", torch.zeros(2, 36, 32), persistent=False)
            self.past, self.num = None, 0

        def forward(self, x):
            new = self.drop(self.lin(self.norm(x)))
            self.kept[:, self.num : self.num + 12] = new
            self.num += 12
            self.past = new if self.past is None else torch.cat([self.past, new], dim=1)
            x = x + (x @ self.past.transpose(1, 2)).softmax(-1) @ self.past
            return x + self.kept[:, : self.num].mean(1, keepdim=True)

    def __init__(self, wrong=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        if wrong is not None:
            self.blocks[wrong].lin.register_forward_hook(lambda _m, _a, out: out * 1.01)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_what_a_step_leaves_for_the_next_is_kept_apart_by_pass(tmp_path):
    """Random numbers, statistics, caches in buffers and attributes: the anchored pass has its own,
    as A's inputs filled them, and the loop is what it would have been."""
    steps = torch.randn(3, 2, 12, 32, generator=torch.Generator().manual_seed(1))

    def looped(name, wrong=None, **options):
        module = Remembering(wrong).train()
        with torch.no_grad(), record(module, out=tmp_path / name, **options) as recording:
            torch.manual_seed(7)
            for step in steps:
                recording.step(step)
        return module, Run.open(tmp_path / name)

    module, a = looped("a")
    other, b = looped("b", like=a)
    assert compare(a, b).verdict.kind == "identical"
    for key in ("norm.running_mean", "kept"):
        path, _, name = f"blocks.1.{key}".rpartition(".")
        ours, theirs = (getattr(each.get_submodule(path), name) for each in (module, other))
        assert torch.equal(ours, theirs)
    assert int(other.blocks[0].norm.num_batches_tracked) == 3 and other.blocks[0].num == 36
    verdict = compare(a, looped("c", 1, like=a)[1]).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "blocks.1.lin:out")


def test_an_argument_that_the_module_writes_to_is_the_caller_s(tmp_path):
    """Keys in a list of tensors: the anchored pass writes to its own."""

    class Writing(Tower):
        def forward(self, x, kept, place):
            for block, keys in zip(self.blocks, kept, strict=True):
                x = x + block(x) + keys.mean()
                keys[:, place : place + 12] = x
            return x

    def looped(name, wrong=1.0, **options):
        module, kept = Writing(), [torch.zeros(1, 24, 32) for _ in range(4)]
        module.blocks[2].register_forward_hook(lambda _m, _a, out: out * wrong)
        with record(module, out=tmp_path / name, **options) as recording:
            recording.step(torch.ones(1, 12, 32), kept, 0)
        return kept

    before = looped("a")
    same, other = looped("b", like=tmp_path / "a"), looped("c", 1.01, like=tmp_path / "a")
    assert all(map(torch.equal, before, same))
    assert not torch.equal(before[3][:, :12], other[3][:, :12])


def test_a_wrapped_module_has_the_names_of_what_is_wrapped(tmp_path):
    """A run of one process repeats that of a wrapper, and the wrapper is as it was."""
    tower, x = nn.DataParallel(Tower()), torch.ones(1, 12, 32)
    with record(tower, out=tmp_path / "a"):
        tower(x)
    a = Run.open(tmp_path / "a")
    assert compare(a, _repeated(Tower(), a, tmp_path / "b")).verdict.kind == "identical"
    assert type(tower) is nn.DataParallel and not vars(tower).get("_compiled_call_impl")


@pytest.mark.slow
def test_a_compiled_module_has_the_names_of_what_is_compiled(tmp_path):
    """Whole or block by block; and compiled code that calls a recorded module makes its steps."""
    x = torch.ones(1, 12, 32)
    inner = Tower()
    inner.blocks[1] = torch.compile(inner.blocks[1], backend="eager")
    for name, module in (("a", torch.compile(Tower(), backend="eager")), ("b", inner)):
        with torch.no_grad(), record(module, out=tmp_path / name):
            module(x)
        report = compare(
            tmp_path / name, _repeated(Tower(), Run.open(tmp_path / name), tmp_path / f"{name}2")
        )
        (line,) = [line for line in report.preflight if line.check == "code"]
        assert report.verdict.kind == "identical" and "torch.compile (eager)" in str(line.detail)
    assert type(inner.blocks[1]).__name__ == "OptimizedModule"
    tower = Tower()
    compiled = torch.compile(tower, backend="eager")
    with torch.no_grad(), record(tower, out=tmp_path / "c"):
        compiled(x)
        compiled(x)
    assert len(Run.open(tmp_path / "c").manifest.tokens.samples) == 2


def test_an_anchored_step_is_none_of_a_recording_within(tmp_path):
    """A part of a module that is recorded by itself is called once a step."""
    for name, options in (("a", {}), ("b", {"like": tmp_path / "a"})):
        tower = Tower()
        with record(tower, out=tmp_path / name, **options) as outer:
            with record(tower.blocks[1], out=tmp_path / f"{name}-inner") as inner:
                tower(torch.ones(1, 12, 32))
            assert (outer.num_steps, inner.num_steps) == (1, 1)


@dataclasses.dataclass
class Fields:
    hidden: torch.Tensor
    num: int = 0


class Named(NamedTuple):
    hidden: torch.Tensor
    num: int = 0


@pytest.mark.parametrize("kind", [Fields, Named])
def test_fields_of_a_dataclass_are_recorded_and_anchored(tmp_path, kind):
    """Of blocks that take and give one, as of a model's result."""

    class Block(nn.Linear):
        def forward(self, state):
            return kind(super().forward(state.hidden), state.num + 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))

        def forward(self, x):
            state = kind(x)
            for block in self.blocks:
                state = block(state)
            return state

    with record(Model(), out=tmp_path / "a") as recording:
        assert recording.step(torch.ones(2, 8)).num == 3
    broken = Model()
    wrong = lambda _m, _a, out: kind(out.hidden * 1.01, out.num)  # noqa: E731
    broken.blocks[1].register_forward_hook(wrong)
    verdict = compare(tmp_path / "a", _repeated(broken, Run.open(tmp_path / "a"), tmp_path / "b"))
    assert verdict.verdict.onset.site == "blocks.1:out"
    assert ".:out" in {record.site for record in Run.open(tmp_path / "a").records}


def test_what_hides_its_modules_says_so(tmp_path):
    """A module of torch.jit, a forward that hands out a generator, and calls of several threads."""

    class Slowly(Tower):
        def forward(self, x):
            for block in self.blocks:
                yield block(x)

    x, said = torch.ones(1, 12, 32), []
    with pytest.warns(DeprecationWarning, match="deprecated"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"the module runs within torch\.jit"):
        capture(scripted, inputs=[torch.ones(1, 4)], out=tmp_path / "a")
    with (
        pytest.raises(UsageError, match=r"1 runs within torch\.jit"),
        record(nn.Sequential(nn.Linear(4, 4), scripted), out=tmp_path / "a"),
    ):
        pass
    with (
        pytest.raises(UsageError, match="forward is a generator"),
        record(Slowly(), out=tmp_path / "b") as recording,
    ):
        recording.step(x)

    class Calling(Tower):
        def forward(self, x):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            return super().forward(x)

    def call():
        try:
            module(x)
        except UsageError as error:
            said.append(str(error))

    module = Calling()
    with record(module, out=tmp_path / "c") as recording:
        recording.step(x)
    assert "called by several threads at once" in said[0]


@pytest.mark.slow
def test_weights_that_change_between_prompts_are_told_of_a_capture(tmp_path, llama):
    """As of record(): prompts behind that are no pairs, and no pass is made with other weights."""

    def changing(model):
        def count(*_):
            changing.num += 1
            if changing.num == 1:
                with torch.no_grad():
                    model.model.layers[1].mlp.down_proj.weight.mul_(1.3)

        model.register_forward_hook(count)

    how = {"prompts": ["Snow", "Rain", "Sun"], "max_new_tokens": 1, "probe": False}
    a = capture(llama, out=tmp_path / "a", **how)
    for like in (None, a):
        changing.num = 0
        options = how if like is None else {"like": like, "probe": False}
        model = llama if like is None else None
        b = capture(model, out=tmp_path / "b", prepare=changing, force=True, **options)
        assert [sample.weights is None for sample in b.manifest.tokens.samples] == [
            True,
            False,
            False,
        ]
        assert b.manifest.plan.passes == ["free"]
        report = compare(a, b)
        assert {site.sample for site in report.sites} == {0}
        [line] = [line for line in report.preflight if line.check == "later weights"]
        assert line.details[0]["sample"] == 1 and line.details[0]["side"] == "candidate"


@pytest.mark.slow
def test_steps_of_weights_that_changed_otherwise_are_not_compared(tmp_path):
    """A loop that trains is equal where it is repeated with its optimizer; with another rate, or
    without it, what follows the first step is another experiment, and is told as that."""

    def trained(out, rate, like=None):
        module = Tower().train()
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        with record(module, out=tmp_path / out, like=like) as recording:
            for number in range(3):
                torch.manual_seed(number)
                recording.step(torch.randn(1, 12, 32)).square().mean().backward()
                optimizer.step()
        return Run.open(tmp_path / out)

    a = trained("a", 0.1)
    assert compare(a, trained("b", 0.1, like=a)).verdict.kind == "identical"
    report = compare(a, trained("c", 0.2, like=a))
    assert {site.sample for site in report.sites} == {0}
    [line] = [line for line in report.preflight if line.check == "later weights"]
    assert line.details[0]["sample"] == 1 and line.details[0]["side"] is None
    module = Tower().train()
    with record(module, out=tmp_path / "e", like=a) as recording:
        for number in range(3):  # by hand, as torch does not count it
            torch.manual_seed(number)
            recording.step(torch.randn(1, 12, 32))
            module.blocks[1][1].weight.data.mul_(1.5)
    assert {site.sample for site in compare(a, tmp_path / "e").sites} == {0}
    module = Tower().train()
    with record(module, out=tmp_path / "f", like=a) as recording:
        for number in range(3):
            torch.manual_seed(number)
            module.blocks[1][1].weight.data.mul_(1.5)
            recording.step(torch.randn(1, 12, 32))
    with pytest.raises(IncomparableError, match="tensors left out: the weights changed while"):
        compare(a, tmp_path / "f")
    with record(Tower().train(), out=tmp_path / "d", like=a) as recording:
        recording.repeat()
    report = compare(a, tmp_path / "d")
    assert report.verdict.kind == "undetermined"  # of the later steps nothing is known
    assert report.verdict.summary.startswith(
        "the weights changed on A alone, not alike from step 1 "
    )
    assert [
        line.details[0]["side"] for line in report.preflight if line.check == "later weights"
    ] == ["reference"]
