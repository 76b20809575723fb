"""compare(run): decode steps with the cache against one forward over the whole sequence.

Healthy models of every kind stay within the floor although a step of one token runs other
kernels than a whole forward. A cache that is wrong is found at its block and its step.
"""

import json

import pytest
import torch

from divergence import RecordOptions, capture, compare
from divergence.errors import UsageError
from tests.digests import without_digests

TEXT = "A bridge is built twice: once on paper, where every beam is exact, and once in steel."
HEALTHY = ("gemma3", "gpt2", "llama", "mamba", "qwen3", "qwen3-moe")
MARGIN = 0.6
ONE_ROW_OFF = {("gemma3", "float16"): 0.75}
"""One decode step of one block is off by 1.04 floors, and all other steps and blocks are equal bit
for bit: what stands out there is held to 1.45 floors, so that one floor, which rounding makes, uses
69%. Of 60 seeds of that model's weights 47 are equal bit for bit, the others use 12% to 72%, the
second 58%."""


@pytest.fixture
def whole_run(tiny_model, tmp_path):
    """``whole_run(architecture, dtype, **options)`` → a run with a whole pass."""

    def make(architecture="llama", dtype="float32", **options):
        options = {"prompts": [TEXT, "Snow falls."], "max_new_tokens": 6} | options
        return capture(
            str(tiny_model(architecture, dtype=dtype, num_blocks=4)),
            out=tmp_path / "run",
            force=True,
            recording=RecordOptions(whole=True),
            **options,
        )

    return make


def at_decode(attention, change):
    """Call ``change(arguments, step)`` before every decode step of a layer of attention."""
    step = 0

    def before(module, args, kwargs):
        nonlocal step
        hidden = args[0] if args else kwargs["hidden_states"]
        step = 0 if hidden.shape[1] > 1 else step + 1
        if step == 0:
            return None
        kwargs = dict(kwargs)
        change(kwargs, step)
        return args, kwargs

    attention.register_forward_pre_hook(before, with_kwargs=True)


def wrong_position(model, block):
    """Every decoded token is rotated as if it stood one place later."""
    angle = model.model.rotary_emb.inv_freq.repeat(2)

    def change(arguments, step):
        cos, sin = arguments["position_embeddings"]
        c, s = angle.cos().to(cos.dtype), angle.sin().to(cos.dtype)
        arguments["position_embeddings"] = (cos * c - sin * s, sin * c + cos * s)

    at_decode(model.model.layers[block].self_attn, change)


def stale_entry(model, block):
    """From the third step on, one place of the cache holds the entry of the place before."""

    def change(arguments, step):
        if step == 3:
            layer = arguments["past_key_values"].layers[block]
            layer.keys[:, :, -2] = layer.keys[:, :, -3]
            layer.values[:, :, -2] = layer.values[:, :, -3]

    at_decode(model.model.layers[block].self_attn, change)


def coarse_cache(model, block):
    """The cache is kept in float8."""

    def change(arguments, step):
        layer = arguments["past_key_values"].layers[block]
        layer.keys = layer.keys.to(torch.float8_e4m3fn).to(layer.keys.dtype)
        layer.values = layer.values.to(torch.float8_e4m3fn).to(layer.values.dtype)

    at_decode(model.model.layers[block].self_attn, change)


def coarse_state(model, block):
    """The recurrent state is kept in bfloat16."""

    def change(arguments, step):
        state = arguments["cache_params"].get_recurrent_state(block, state_idx=0)
        state.copy_(state.bfloat16())

    at_decode(model.backbone.layers[block].mixer, change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", HEALTHY)
def test_a_healthy_cache_is_within_the_floor(architecture, dtype, whole_run):
    """A left-padded batch, prompts longer than a sliding window: with room to spare."""
    report = compare(whole_run(architecture, dtype, batch=True))
    assert report.verdict.kind in ("identical", "within_floor")
    assert {site.pass_ for site in report.sites} == {"anchored"}
    assert {site.step for site in report.sites} == {1, 2, 3, 4, 5}
    assert {site.sample for site in report.sites} == {0, 1}
    assert report.coverage.unmatched == []
    margin = ONE_ROW_OFF.get((architecture, dtype), MARGIN)
    assert max(site.limit_usage or 0.0 for site in report.sites) < margin


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "block", "step"), [(wrong_position, 1, 1), (stale_entry, 2, 3), (coarse_cache, 3, 1)]
)
def test_a_wrong_cache_is_found(fault, block, step, dtype, whole_run):
    """At its block, from the step on in which it is wrong, at the token of that step."""
    run = whole_run(dtype=dtype, prepare=lambda model: fault(model, block))
    verdict = compare(run).verdict
    length = len(run.manifest.tokens.samples[0].prompt_ids)
    assert verdict.kind == "localized"
    assert verdict.onset.site == f"model.layers.{block}:out"
    assert (verdict.onset.sample, verdict.onset.step) == (0, step)
    assert verdict.onset.position == length + step - 1
    assert verdict.confidence == "high"
    assert verdict.summary == (
        "decode steps with the cache against one forward over the whole sequence: "
        f"the error is made at model.layers.{block}:out"
        + ("" if step == 1 else f" from decode step {step} on")
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
def test_pads_are_not_counted_in_the_position(architecture, whole_run):
    """The short prompt of a batch: its wrong token is named by its place in its own sequence."""
    run = whole_run(
        architecture,
        batch=True,
        prompts=["Snow falls.", TEXT],
        prepare=lambda model: stale_entry(model, 2),
    )
    onset = compare(run).verdict.onset
    assert run.manifest.tokens.samples[0].num_left_pad > 0
    length = len(run.manifest.tokens.samples[0].prompt_ids)
    assert (onset.block, onset.sample, onset.step) == ("model.layers.2", 0, 3)
    assert onset.position == length + 2


@pytest.mark.slow
def test_a_coarse_state_is_found(whole_run):
    """A recurrent state is no cache of rows, and is judged alike."""
    run = whole_run("mamba", prepare=lambda model: coarse_state(model, 2))
    verdict = compare(run).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "backbone.layers.2:out")


@pytest.mark.slow
def test_a_coarse_cache_everywhere_is_systematic(whole_run):
    """All blocks alike: the cache's dtype, not a layer."""
    run = whole_run(prepare=lambda m: [coarse_cache(m, block) for block in range(4)])
    assert compare(run).verdict.kind == "systematic"


@pytest.mark.slow
def test_a_wrong_rotary_table_is_found_where_it_is_made(whole_run):
    """Blocks get the recorded tables, so that the module which made them is named."""

    def shifted(model):
        def before(module, args, kwargs):
            ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            if ids.shape[1] == 1:
                kwargs = kwargs | {"position_ids": ids + 1}
                return args[:1], kwargs
            return None

        model.model.rotary_emb.register_forward_pre_hook(before, with_kwargs=True)

    verdict = compare(whole_run(prepare=shifted)).verdict
    assert verdict.onset.site.startswith("model.rotary_emb:out")
    assert verdict.onset.step == 1


@pytest.mark.slow
def test_every_module_is_compared_and_what_has_no_rows_is_counted(whole_run):
    """Attention weights grow with the step: skipped by name, never a pass."""
    report = compare(whole_run(sites=["modules"], max_new_tokens=4))
    assert report.verdict.kind in ("identical", "within_floor")
    assert "model.layers.0.self_attn.q_proj:out" in {site.site for site in report.sites}
    assert report.coverage.num_skipped == len(report.coverage.unmatched) > 0
    reasons = {item.site: item.reason for item in report.coverage.unmatched}
    assert reasons["model.layers.0.self_attn:out.1"].startswith("its rows are not tokens on axis 1")


def test_logits_are_compared(whole_run):
    """Each decode step's next-token distribution against the whole forward's."""
    report = compare(whole_run())
    steps = {site.step for site in report.sites if site.logits is not None}
    assert steps == {1, 2, 3, 4, 5}


@pytest.mark.slow
def test_the_commands_go_into_the_block(whole_run):
    """One run is made, with what is inside the block, and compared with itself."""
    verdict = compare(whole_run(prepare=lambda model: wrong_position(model, 1))).verdict
    made, compared = verdict.next
    assert "--whole" in made
    assert "--sites 'model.layers.1.*'" in made
    assert compared.split()[:2] == ["divergence", "compare"]
    assert len(compared.split()) == 3


@pytest.mark.slow
def test_16_bits_send_to_float32(whole_run):
    """What a 16-bit floor hides is looked for in the same tokens in float32, by one run again."""
    verdict = compare(whole_run("mamba", dtype="bfloat16")).verdict
    assert verdict.kind == "within_floor"
    made, compared = verdict.next
    assert "--whole --dtype float32" in made
    assert compared.endswith("-float32")
    assert any("unless made in float32" in fact.text for fact in verdict.evidence)


def test_options_for_two_runs_are_refused(whole_run):
    """A truth, a floor, a name map, layers or --force have no meaning for one run."""
    run = whole_run(prompts=["Snow"], max_new_tokens=2)
    for options in (
        {"truth": run},
        {"floor": [run]},
        {"name_map": "names.toml"},
        {"layers": [run]},
        {"force": True},
    ):
        with pytest.raises(UsageError, match="a comparison of two runs"):
            compare(run, **options)


@pytest.mark.parametrize(("name", "options"), [("llama", {"max_new_tokens": 1}), ("bert", {})])
def test_a_run_without_decode_steps_has_nothing_to_hold_against_itself(
    name, options, tiny_model, tmp_path
):
    """No command is offered that would make no whole pass either."""
    run = capture(
        str(tiny_model(name)),
        out=tmp_path / "a",
        prompts=["Snow"],
        recording=RecordOptions(whole=True),
        **options,
    )
    with pytest.raises(UsageError, match="alone has nothing to compare") as caught:
        compare(run)
    assert caught.value.hint == (f"divergence compare {run.path} OTHER   # with a second run",)


def test_without_a_whole_pass_there_is_nothing_to_compare(tiny_model, tmp_path):
    """The error prints the two commands that make it possible."""
    run = capture(str(tiny_model("llama")), out=tmp_path / "a", prompts=["Snow"], max_new_tokens=3)
    with pytest.raises(UsageError, match="holds no whole pass") as caught:
        compare(run)
    _, *made = caught.value.hint
    assert made[0].startswith(f"divergence capture --like {run.path} -o {run.path}-whole --whole")
    assert made[1] == f"divergence compare {run.path}-whole"


@pytest.mark.slow
def test_a_step_without_its_whole_row_is_counted(whole_run):
    """A site that is missing from the whole pass is skipped with its reason."""
    run, gone = whole_run(), "model.layers.1:out"
    without_digests(run.path)
    lines = (run.path / "records.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    kept = [
        x for x, r in zip(lines, found, strict=True) if (r["pass"], r["site"]) != ("whole", gone)
    ]
    (run.path / "records.jsonl").write_text("\n".join(kept) + "\n")
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["sizes"]["num_records"] = len(kept)
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    report = compare(run.path)
    assert {item.site for item in report.coverage.unmatched} == {gone}
    assert {item.reason for item in report.coverage.unmatched} == {"not in the whole pass"}
    assert report.coverage.num_skipped == 10
