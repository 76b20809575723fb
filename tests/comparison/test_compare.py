"""compare(): what is matched, what is left out, and which verdict follows."""

import collections
import shutil

import msgspec
import pytest
import torch

from divergence import BatchOptions, Run, capture, compare
from divergence.comparison.align import find_prefix, load_name_map
from divergence.errors import ConfigError, IncomparableError, RunFormatError
from divergence.run.site import module_of

PROMPTS = ["A bridge is built twice: once on paper, where every beam is exact.", "Snow fell"]


@pytest.fixture
def run(shared_run):
    """``run(architecture, model={...}, **capture options)`` → a run; equal arguments, one run."""

    def make(architecture="llama", *, model=None, **options):
        options = {"prompts": PROMPTS[:1], "max_new_tokens": 3} | options
        return shared_run(architecture, model={"dtype": "float32"} | (model or {}), **options)

    return make


@pytest.fixture
def replay(tmp_path):
    """``replay(run, **options)`` → the run repeated here."""
    count = 0

    def again(reference, **options):
        nonlocal count
        count += 1
        return capture(like=reference, out=tmp_path / f"replay-{count}", **options)

    return again


def reasons(report) -> collections.Counter:
    return collections.Counter(skipped.reason for skipped in report.coverage.unmatched)


def line(report, check):
    return next(line for line in report.preflight if line.check == check)


# --- what is matched ---------------------------------------------------------------------------


def test_identical_runs_are_identical(run, replay):
    """Every bit equal: the strongest verdict, and every number of it is 0."""
    report = compare(run(), replay(run()))
    assert (report.verdict.kind, report.verdict.confidence) == ("identical", "high")
    assert report.verdict.onset is None
    assert {site.rel_l2 for site in report.sites} == {0.0}
    assert all(site.identical and not site.flagged for site in report.sites)
    assert {line.status for line in report.preflight} == {"same"}


def test_a_run_compared_with_itself_proves_nothing(run, tmp_path):
    """One directory twice, or a copy: every bit is equal, and no verdict follows from it."""
    shutil.copytree(run().path, tmp_path / "copy")
    for other in (run().path, tmp_path / "copy"):
        report = compare(run().path, other)
        assert all(site.identical for site in report.sites)
        assert (report.verdict.kind, report.verdict.confidence) == ("undetermined", "low")
        assert "proves nothing" in report.verdict.summary
        assert run().manifest.id in report.verdict.evidence[0].text
    shard = next((tmp_path / "copy/tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    with pytest.raises(RunFormatError, match="wrong checksum"):
        compare(run().path, tmp_path / "copy")


def test_sites_without_a_partner_are_counted_and_no_pass(run, replay):
    """What only one side recorded is listed with its side, and lowers the confidence."""
    other = replay(run(), sites=["model.layers.*"])
    report = compare(run(), other)
    coverage = report.coverage
    assert coverage.num_only_reference > 0
    assert len(coverage.unmatched) == (
        coverage.num_only_reference + coverage.num_only_candidate + coverage.num_skipped
    )
    missing = {s.site for s in coverage.unmatched if s.side == "reference"}
    assert {"lm_head:out", "model.norm:out"} <= missing
    assert not any(site.site == "lm_head:out" for site in report.sites)
    assert (report.verdict.kind, report.verdict.confidence) == ("identical", "medium")
    assert "no partner" in report.verdict.summary


def test_nothing_in_common_is_an_error(run):
    """Comparing nothing is never a pass."""
    one, two = run(sites=["lm_head:out"]), run(sites=["model.embed_tokens:out"])
    with pytest.raises(IncomparableError, match="nothing was compared") as told:
        compare(one, two)
    assert told.value.hint[0].startswith(f"divergence capture --like {one.path} -o NEW")


def test_a_base_model_is_matched_with_its_causal_lm(run):
    """layers.0 and model.layers.0 are one block; the rule that says so is shown."""
    whole, base = run(), run(task="encoder")
    assert base.manifest.model.model_class == "LlamaModel"
    report = compare(whole, base)
    assert report.verdict.kind == "identical", report.verdict
    assert "sites were matched with the prefix model. read as (nothing)" in report.notes
    sites = {site.site: site for site in report.sites}
    for block in range(3):
        found = sites[f"model.layers.{block}:out"]
        assert found.candidate_site == f"layers.{block}:out"
        assert found.match == "prefix model. → (none)"
    assert "lm_head:out" in {s.site for s in report.coverage.unmatched}
    weights = line(report, "weights")
    assert weights.status == "differs"
    assert "lm_head.weight" in weights.detail
    back = compare(base, whole)
    assert back.verdict.kind == "identical"
    assert back.coverage.num_compared == report.coverage.num_compared


def test_a_name_map_matches_other_names(run, replay, tmp_path):
    """A file of module names pairs what no prefix pairs, and nothing else is paired; a trusted run,
    which repeats A, has A's names."""
    names = tmp_path / "names.toml"
    names.write_text('[map]\n"model.layers.{n}" = "layers.{n}"\n')
    report = compare(run(), run(task="encoder"), name_map=names)
    assert {s.match for s in report.sites} == {"name map"}
    assert {module_of(s.site) for s in report.sites} == {f"model.layers.{n}" for n in range(3)}
    assert "model.norm:out" in {s.site for s in report.coverage.unmatched}
    trusted = replay(run(), plants=["model.layers.1.mlp:out=scale:2"])
    widened = compare(run(), run(task="encoder"), name_map=names, floor=[trusted])
    assert any("most at model.layers.1:out" in note for note in widened.notes)
    off = run(task="encoder", plants=["layers.1.mlp:out=scale:2"])
    commands = compare(run(), off, name_map=names).verdict.commands
    assert "compare" in {each.name for each in commands}
    for each in commands:  # none that reads the names of one model alone, or forgets the map
        assert each.name != "localize"
        assert each.name != "compare" or each.options["map"] == str(names)


@pytest.mark.parametrize(
    ("text", "told"),
    [('[map]\n"a.{n}" = "b"', "equally many"), ('[mapp]\n"a" = "b"', "map"), ("[map", "TOML")],
)
def test_wrong_name_maps_are_refused(text, told, tmp_path):
    """The error names the file and what is wrong in it."""
    names = tmp_path / "names.toml"
    names.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        load_name_map(names)
    assert str(names) in str(caught.value)


def test_name_maps_rename_whole_modules(tmp_path):
    """The longest name wins, calls and ports stay, and a longer name is not cut."""
    names = tmp_path / "names.toml"
    names.write_text('[map]\n"a.{n}" = "h.{n}"\n"a.{n}.mlp" = "ffn.{n}"\n"a" = "z"\n')
    rename = load_name_map(names)
    assert rename("a.3:out") == "h.3:out"
    assert rename("a.3.mlp.up:in") == "ffn.3.up:in"
    assert rename("a.3.mlp2:out") == "h.3.mlp2:out"
    assert rename("a.12#2:out.1") == "h.12#2:out.1"
    assert rename("ab.3:out") == "ab.3:out"
    assert rename("a:out") == "z:out"


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        (["model.a:out", "model.b:out"], ["a:out", "b:out"], ("model.", "")),
        (["a:out"], ["a:out"], None),
        (["model.a:out", "c:out"], ["language_model.model.a:out"], ("", "language_model.")),
        (["x.a:out"], ["b:out"], None),
        ([], [], None),
    ],
)
def test_prefixes_are_found(ours, theirs, found):
    """The prefixes under which most names agree, or none."""
    assert find_prefix(ours, theirs) == found


def test_some_positions_are_compared_with_all(run):
    """A run that kept only some tokens is compared at those."""
    one, two = run(), run(positions="0,last:2")
    for report in (compare(one, two), compare(two, one)):
        assert report.verdict.kind == "identical", report.verdict
        shapes = {s.shape[1] for s in report.sites if s.site == "model.layers.1:out" and not s.step}
        assert shapes == {3}
        assert report.coverage.unmatched == []


# --- other experiments -------------------------------------------------------------------------


def test_other_weights_are_incomparable(run):
    """Another checkpoint is another experiment: the parameters that differ are named."""
    report = compare(run(), run(model={"seed": 1}))
    assert report.verdict.kind == "incomparable"
    assert report.sites == []
    assert report.coverage.num_compared == 0
    weights = line(report, "weights")
    assert weights.status == "blocking"
    assert "model.embed_tokens.weight" in weights.detail
    assert any("--force" in command for command in report.verdict.next)


def test_one_changed_parameter_is_named(run, tiny_model, tmp_path):
    """The first question after a bad answer: is it one shard?"""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama", dtype="float32"), folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 1.001
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    other = capture(str(folder), out=tmp_path / "run", prompts=PROMPTS[:1], max_new_tokens=3)
    found = line(compare(run(), other), "weights").detail
    assert "; 1 of " in found
    assert name in found
    forced = compare(run(), other, force=True)
    assert forced.verdict.kind == "localized"
    assert forced.verdict.onset.block == "model.layers.1"


def test_other_tokens_are_incomparable(run, tmp_path):
    """Another prompt is another experiment; force measures what is left."""
    for ids in ([30, 31, 32, 33], [30, 31, 99, 33]):
        (tmp_path / f"{ids[2]}.jsonl").write_text(f'{{"input_ids": {ids}}}')
    one, two = (
        run(prompts=[], prompts_file=str(tmp_path / f"{token}.jsonl")) for token in (32, 99)
    )
    report = compare(one, two)
    assert report.verdict.kind == "incomparable"
    assert "differs from token 2 on" in line(report, "prompt ids").detail
    assert line(report, "weights").status == "same"
    forced = compare(one, two, force=True)
    assert forced.coverage.num_compared > 0
    assert forced.verdict.kind != "incomparable"


def test_another_number_of_prompts_is_incomparable(run):
    """So is one prompt more."""
    report = compare(run(), run(prompts=PROMPTS))
    assert report.verdict.kind == "incomparable"
    assert line(report, "prompt ids").detail == "1 prompts against 2"


def test_dtypes_are_compared_in_the_wider(run, replay):
    """A bfloat16 run of float32 weights is the same experiment, coarser: no alarm."""
    report = compare(run(), replay(run(), dtype="bfloat16"))
    assert report.verdict.kind == "within_floor", report.verdict
    assert line(report, "weights").detail == "the same weights, rounded from float32 to bfloat16"
    assert line(report, "dtype").detail == "compared in the wider of the two"
    site = next(s for s in report.sites if s.site == "model.layers.2:out")
    assert (site.reference_dtype, site.candidate_dtype) == ("float32", "bfloat16")
    assert 1e-4 < site.rel_l2 < 1e-1


# --- nan and inf -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan:7", "inf:7"])
def test_nonfinite_on_one_side_is_a_verdict(fault, run, replay):
    """The side and the first site are named, whatever the other numbers are."""
    plant = f"model.layers.1:out={fault}"
    report = compare(run(), replay(run(), plants=[plant]))
    verdict = report.verdict
    assert (verdict.kind, verdict.side, verdict.confidence) == ("nonfinite", "candidate", "high")
    assert verdict.onset.site == "model.layers.1:out"
    report = compare(run(plants=[plant]), run())
    assert (report.verdict.kind, report.verdict.side) == ("nonfinite", "reference")
    assert report.verdict.onset.site == "model.layers.1:out"
    first = next(s for s in report.sites if s.site == "model.layers.1:out")
    assert first.nonfinite.total == 1
    msgspec.json.decode(report.to_json())  # nan and inf are still JSON


@pytest.mark.slow
def test_nan_on_both_sides_is_nonfinite(run, replay):
    """One nan that both machines make at one place: equal bits, and no result on either side."""
    plant = "model.layers.1.mlp.down_proj:out=nan:7"
    reference = run(plants=[plant])
    for other in (
        replay(reference, plants=[plant]),
        replay(reference, plants=[plant], attn_implementation="sdpa"),
    ):
        verdict = compare(reference, other).verdict
        assert (verdict.kind, verdict.side, verdict.confidence) == ("nonfinite", "both", "high")
        assert verdict.onset.site == "model.layers.1:out"
        assert "both sides" in verdict.summary


# --- tokens ------------------------------------------------------------------------------------


def test_different_tokens_are_reported_with_their_margins(run, replay):
    """Where the choices part, both sides' candidates are shown, and how close it was."""
    other = replay(run(), plants=["lm_head:out=roll", "lm_head:out=scale:-1"])
    tokens = compare(run(), other).tokens
    assert tokens.forced
    assert tokens.num_equal < tokens.num_tokens == 3
    first = tokens.first_difference
    assert (first.sample, first.step) == (0, 0)
    assert first.reference.id == run().manifest.tokens.samples[0].chosen_ids[0]
    assert first.candidate.id == other.manifest.tokens.samples[0].chosen_ids[0]
    assert first.margin > 0
    assert first.candidate_margin >= 0
    assert first.reference_top[0].id == first.reference.id
    assert first.reference.logprob == pytest.approx(first.reference_top[0].logprob)
    row = run().read(run().find(("free", 0, 0, "lm_head:out")))[0, -1].double()
    top = row.topk(2).values
    assert first.margin == pytest.approx(float(top[0] - top[1]), rel=1e-6)


def test_after_another_token_nothing_is_compared(run):
    """A candidate that went its own way is compared up to there; the rest says why not."""
    one, two = run(max_new_tokens=4), run(max_new_tokens=4, plants=["lm_head:out=scale:-1"])
    assert two.manifest.tokens.forced_by is None
    report = compare(one, two)
    assert {site.step for site in report.sites} == {0}
    assert reasons(report) == {
        "after the first different token the two sides were fed different tokens": sum(
            record.step > 0 for record in one.records
        )
    }
    assert not report.tokens.forced
    assert report.tokens.first_difference.step == 0
    assert report.verdict.kind == "localized"
    assert report.verdict.onset.site == "lm_head:out"
    assert report.verdict.confidence == "low"


def test_the_flip_is_related_to_the_onset(run, replay):
    """A token that flips in the forward where the error is made is said to."""
    other = replay(run(), plants=["model.layers.0:out=noise:3"])
    report = compare(run(), other)
    assert report.tokens.first_difference.order_to_onset in ("same step", "after")


# --- measuring ---------------------------------------------------------------------------------


def test_numbers_are_those_of_the_tensors(run, replay):
    """rel_l2, max_abs and the worst position of a site, from the stored tensors themselves."""
    one = run()
    two = replay(one, plants=["model.layers.1:out=noise:0.1"])
    report = compare(one, two)
    site = next(s for s in report.sites if (s.pass_, s.site) == ("free", "model.layers.2:out"))
    a, b = (r.read(r.find(("free", 0, 0, site.site))).double() for r in (one, two))
    d = a - b
    assert site.rel_l2 == pytest.approx(float(d.norm() / a.norm()), rel=1e-6)
    assert site.max_abs == pytest.approx(float(d.abs().max()), rel=1e-6)
    per_token = d.norm(dim=-1) / a.norm(dim=-1)
    assert site.worst_position == int(per_token[0].argmax())
    assert site.token_rel_l2_max == pytest.approx(float(per_token.max()), rel=1e-6)
    before = one.read(one.find(("free", 0, 0, "model.layers.2:in"))).double()
    assert site.update_rel_l2 == pytest.approx(float(d.norm() / (a - before).norm()), rel=1e-6)


def test_pads_are_masked(run, replay):
    """In a padded batch the metrics are those of the real tokens."""
    one = run(prompts=PROMPTS, batch=True)
    two = replay(one, plants=["model.layers.1:out=noise:0.1"])
    site = next(
        s
        for s in compare(one, two).sites
        if (s.pass_, s.site, s.step) == ("free", "model.layers.1:out", 0)
    )
    pads = [s.num_left_pad for s in one.manifest.tokens.samples]
    assert site.num_masked == sum(pads) > 0
    a, b = (r.read(r.find(("free", 0, 0, site.site))).double() for r in (one, two))
    keep = torch.ones(a.shape[:2], dtype=torch.bool)
    for row, count in enumerate(pads):
        keep[row, :count] = False
    a, b = a[keep], b[keep]
    assert site.rel_l2 == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-6)


def test_damaged_bytes_are_named(run, replay):
    """A tensor whose bytes are not what was recorded stops the comparison."""
    other = replay(run(), attn_implementation="sdpa")
    shard = next((other.path / "tensors").iterdir())
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")  # after the safetensors header
    content[start::64] = bytes(len(content[start::64]))
    shard.write_bytes(content)
    with pytest.raises(RunFormatError, match="checksum"):
        compare(run().path, other.path)


# --- which pass against which ------------------------------------------------------------------


def anchored_blocks(report) -> set[str]:
    return {s.block for s in report.sites if s.pass_ == "anchored" and s.flagged}


def test_the_order_of_the_runs_does_not_matter(run, replay):
    """Compared the other way round, the same block is found: the anchored pass is the first's."""
    other = replay(run(), attn_implementation="sdpa", plants=["model.layers.1:out=scale:1.2"])
    for report in (compare(run(), other), compare(other, run())):
        assert report.verdict.kind == "localized"
        assert report.verdict.onset.site == "model.layers.1:out"
        assert report.verdict.confidence == "high"
        assert anchored_blocks(report) == {"model.layers.1"}


def test_two_repeats_of_one_run_are_compared_anchored(run, replay):
    """Two machines anchored to a third run had equal inputs too."""
    one = replay(run(), attn_implementation="sdpa")
    two = replay(run(), plants=["model.layers.2:out=scale:1.2"])
    report = compare(one, two)
    assert report.verdict.kind == "localized"
    assert anchored_blocks(report) == {"model.layers.2"}


def test_an_anchored_pass_to_another_run_is_not_used(run, replay):
    """It was fed something else: the free runs are judged, and that is said."""
    between = replay(run(), plants=["model.layers.0:out=scale:1.1"])
    other = replay(between, attn_implementation="sdpa")
    report = compare(run(), other)
    assert {site.pass_ for site in report.sites} == {"free"}
    assert any("another run's inputs" in note for note in report.notes)
    assert {s.reason for s in report.coverage.unmatched} == {"pass without a partner"}


def test_fewer_tokens_are_a_shorter_repeat(run, replay):
    """What the shorter run lacks is counted."""
    report = compare(run(), replay(run(), max_new_tokens=2))
    assert report.verdict.kind == "identical"
    assert report.verdict.confidence == "medium"
    assert {s.step for s in report.coverage.unmatched} == {2}


def test_one_wrong_token_is_found(run, replay):
    """A fault at a single position is a matter of that token, not of the typical one."""

    def at_one(module, args, output):
        output[:, 6:7] *= 1.5

    def prepare(model):
        model.model.layers[1].register_forward_hook(at_one)

    other = replay(run(), attn_implementation="sdpa", prepare=prepare)
    verdict = compare(run(), other).verdict
    assert (verdict.kind, verdict.onset.site) == ("localized", "model.layers.1:out")
    assert verdict.onset.position == 6
    assert "one token" in verdict.evidence[0].text


def test_the_second_prompt_alone_can_be_wrong(run, replay):
    """The onset names the prompt in which the error is made."""
    reference = run(prompts=PROMPTS)
    other = replay(reference, plants=["model.layers.1:out=scale:1.2@sample=1"])
    verdict = compare(reference, other).verdict
    assert verdict.kind == "localized"
    assert (verdict.onset.site, verdict.onset.sample) == ("model.layers.1:out", 1)


def test_the_worst_token_of_a_padded_batch_is_found_by_sample_and_position(tiny_model, tmp_path):
    """In a batch the onset names the sample that holds the worst token, and does not count pads."""
    prompts = ["One two three four five six seven eight nine ten.", "Short."]
    model = str(tiny_model("llama", dtype="float32"))
    a = capture(
        model,
        out=tmp_path / "a",
        prompts=prompts,
        batching=BatchOptions(batch=True),
        max_new_tokens=1,
        device="cpu",
    )
    b = capture(
        like=a, out=tmp_path / "b", device="cpu", plants=["model.layers.1:out=channel:3:1.5"]
    )
    report = compare(a, b)
    site = next(s for s in report.sites if s.pass_ == "anchored" and s.site == "model.layers.1:out")
    record = a.find(("free", 0, 0, "model.layers.1:out"))
    x = Run.open(a.path).read(record).double()
    y = b.read(b.find(("anchored", 0, 0, "model.layers.1:out"))).double()
    rows = (x - y).norm(dim=-1) / x.norm(dim=-1)
    pads = [sample.num_left_pad for sample in a.manifest.tokens.samples]
    for number, count in enumerate(pads):
        rows[number, :count] = -torch.inf
    sample, token = divmod(int(rows.argmax()), rows.shape[1])
    assert (site.worst_sample, site.worst_position) == (sample, token - pads[sample])
    assert (report.verdict.onset.sample, report.verdict.onset.position) == (
        sample,
        token - pads[sample],
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"use_cache": False}, "1 × batch 1, no cache"),
        ({"prefill_chunk": 2}, "1 × batch 1, in chunks of 2"),
    ],
    ids=["no cache", "chunks"],
)
def test_prompts_fed_in_another_way_are_a_setting_that_differs(how, told, answer, shared_run):
    """Without a cache, or in chunks, other kernels run: the settings are not all the same."""
    a = shared_run(model={"dtype": "float32"}, prompts=["Snow fell"], max_new_tokens=2, probe=False)
    shape = next(line for line in answer(a, **how).preflight if line.check == "batch shape")
    assert (shape.status, shape.candidate) == ("differs", told)
