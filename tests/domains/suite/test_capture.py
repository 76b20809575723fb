"""Capturing a suite, repeating it, and its truth: journeys, options, and damaged runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from divergence import CaseOptions, RecordOptions, Run, capture, compare, replay
from divergence import truth as make_truth
from divergence.domains.suite.definition import Unavailable
from divergence.errors import RunExistsError, RunFormatError, UsageError
from tests import by_hand
from tests.digests import without_digests

FEW = ["rms_norm.float32.*", "topk.bfloat16.odd*"]


def edit_records(run: Run, folder: Path, change) -> Path:
    """A copy of ``run`` in which ``change`` was applied to every record line."""
    shutil.copytree(run.path, folder)
    without_digests(folder)
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_suite_is_a_run(quick):
    """It opens and verifies; each case has its inputs, its results and the call that ties them."""
    run, _ = quick
    assert run.manifest.complete
    assert not run.verify()
    model = run.manifest.model
    assert (model.source, model.model_class, model.task) == ("suite:quick", "suite", "operators")
    assert run.manifest.plan.passes == ["free"]
    record = run.at_site("rms_norm.bfloat16.odd.strided.normal/suite.rms_norm:out")[0]
    call = record.call
    assert call.operator == "suite.rms_norm"
    assert call.arguments == {"x": {"tensor": 0}, "weight": {"tensor": 1}, "eps": 1e-6}
    assert call.operands[0].site == "rms_norm.bfloat16.odd.strided.normal/suite.rms_norm:in.x"
    assert call.operands[0].stride == (132, 1)
    assert call.operands[1].stride is None
    notes = run.manifest.plan.modules
    assert notes["rms_norm.bfloat16.odd.strided.normal"].kind == "torch"


@pytest.mark.slow
def test_a_repeat_has_the_same_bits(quick, tmp_path):
    """--like takes the recorded bytes; on the same machine every result is the same."""
    run, truth = quick
    again = capture(like=run, out=tmp_path / "b")
    assert again.manifest.plan.passes == ["replayed"]
    assert again.manifest.plan.anchored_to == again.manifest.like == run.manifest.id
    assert again.manifest.plan.replayed_pass == "free"
    assert again.manifest.model.digest == run.manifest.model.digest
    report = compare(run, again, truth=truth)
    assert report.verdict.kind == "identical"
    assert report.coverage.num_compared == len(report.suite.cases) > 400
    assert not report.coverage.unmatched


def test_a_repeat_takes_the_recorded_bytes(quick, tmp_path):
    """Where a recorded input is not what the generator makes, the recorded one is used; as it was
    laid out."""
    run, _ = quick
    strides = []

    def rms_norm(x, weight, eps):
        strides.append(x.stride())
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    site = "silu.float32.odd.normal/suite.silu:in.x"
    other = run.at_site("silu.float32.odd.cancelling/suite.silu:in.x")[0]

    def swap(line):
        if line["site"] == site:
            line |= {
                "place": {"shard": other.place.shard, "key": other.place.key},
                "xxh3": other.xxh3,
            }

    changed = edit_records(run, tmp_path / "changed", swap)
    again = capture(
        like=changed,
        out=tmp_path / "b",
        sites=["silu.float32.odd.normal", "rms_norm.bfloat16.odd.strided.normal"],
        cases=CaseOptions(impl={"rms_norm": rms_norm}),
    )
    assert set(strides) == {(132, 1)}
    found = again.read(again.at_site(site.replace(":in.x", ":out"))[0])
    expected = run.at_site("silu.float32.odd.cancelling/suite.silu:out")[0]
    assert torch.equal(found, run.read(expected))


@pytest.mark.slow
def test_other_inputs_are_not_compared(quick, tmp_path):
    """A case whose inputs differ is skipped with the reason, the others are compared."""
    run, _ = quick

    def change(line):
        if line.get("call") and line["site"].startswith("rms_norm.float32.odd.normal/"):
            line["call"]["arguments"]["eps"] = 1e-5

    other = Run.open(edit_records(run, tmp_path / "other", change))
    report = compare(run, other)
    skipped = report.coverage.unmatched
    assert [item.site for item in skipped] == ["rms_norm.float32.odd.normal/suite.rms_norm:out"]
    assert "inputs" in skipped[0].reason
    assert report.coverage.num_compared == len(report.suite.cases)


def test_the_truth_has_what_it_is_judged_by(quick):
    """Float64 results, the error that rounding explains, codes and indices as they are."""
    _, truth = quick
    assert truth.manifest.settings.compute_dtype == "float64"
    dtypes = {record.site: record.dtype for record in truth.records}
    case = "linear.bfloat16.odd.normal/suite.linear"
    assert dtypes[f"{case}:out"] == "float64"
    assert dtypes[f"{case}:out.floor"] == dtypes[f"{case}:out.gain"] == "float32"
    assert dtypes["quantize.bfloat16.odd.ties.per_tensor/suite.quantize:out"] == "int8"
    assert dtypes["cast_e4m3fn.float32.odd.normal/suite.cast_e4m3fn:out"] == "float8_e4m3fn"
    assert dtypes["topk.float32.odd.ties/suite.topk:out.1"] == "int64"
    assert dtypes["topk.float32.odd.ties/suite.topk:out.1.scores"] == "float64"
    assert "argmax.float32.odd.ties/suite.argmax:out.scores" not in dtypes
    assert not truth.verify()


def test_some_cases(tmp_path):
    """--sites chooses cases; a pattern that matches none is an error that says how to list them."""
    run = capture("suite:llm", out=tmp_path / "a", sites=FEW)
    assert {record.site.partition(".")[0] for record in run.records} == {"rms_norm", "topk"}
    again = capture(like=run, out=tmp_path / "b")
    assert len(again.records) == len(run.records)
    with pytest.raises(UsageError, match="matches no case"):
        capture("suite:llm", out=tmp_path / "c", sites=["norm"])


def test_a_dry_run_lists_cases(dry_run):
    """Without running anything: each case, its first tensor's shape, the bytes of all."""
    plan = dry_run("suite:quick", "--sites", "linear.float32.odd.normal")
    (row,) = plan["rows"]
    assert (row["site"], row["shape"]) == ("linear.float32.odd.normal", [7, 129])
    assert plan["total_bytes"] == 4 * (7 * 129 + 65 * 129)


def test_repeatability_is_measured(tmp_path):
    """--repeat runs each case again; an operator that draws random numbers is found out."""
    run = capture("suite:quick", out=tmp_path / "a", sites=FEW, recording=RecordOptions(repeat=2))
    assert run.manifest.repeatability.num_different == 0
    assert run.manifest.repeatability.num_compared > 0
    noisy = capture(
        "suite:quick",
        out=tmp_path / "b",
        sites=["silu.float32.odd.normal"],
        recording=RecordOptions(repeat=2),
        cases=CaseOptions(impl={"silu": torch.rand_like}),
    )
    assert noisy.manifest.repeatability.num_different == 1
    assert noisy.manifest.repeatability.first_difference == "silu.float32.odd.normal"


def test_what_cannot_run_is_skipped_and_counted(tmp_path):
    """A kernel that refuses a case costs that case alone, with the reason; one that refuses all
    is an error."""

    def no_half(x):
        if x.dtype == torch.float16:
            raise NotImplementedError("no kernel for Half")
        return torch.nn.functional.silu(x)

    notes = []
    run = capture(
        "suite:llm",
        out=tmp_path / "a",
        sites=["silu.*.odd.normal"],
        cases=CaseOptions(impl={"silu": no_half}),
        progress=lambda event, done, total, detail: event == "note" and notes.append(detail),
    )
    assert run.manifest.plan.skipped_operators == {"silu: no kernel for Half": 1}
    assert notes == ["1 case skipped: silu: no kernel for Half"]
    whole = capture("suite:llm", out=tmp_path / "b", sites=["silu.*.odd.normal"])
    report = compare(whole, run)
    assert [item.reason for item in report.coverage.unmatched] == ["no partner"]
    assert any("no kernel for Half" in note for note in report.notes)

    def never(x):
        raise Unavailable("not on this device")

    with pytest.raises(UsageError, match="no operator could be run"):
        capture(
            "suite:llm",
            out=tmp_path / "c",
            sites=["silu.*"],
            cases=CaseOptions(impl={"silu": never}),
        )


def test_kernels_that_write_to_their_inputs(tmp_path):
    """Inputs are recorded as they were drawn, whatever a kernel does to them."""
    sites = ["silu.float32.odd.normal"]
    plain = capture("suite:llm", out=tmp_path / "a", sites=sites)
    wild = capture(
        "suite:llm",
        out=tmp_path / "b",
        sites=sites,
        cases=CaseOptions(impl={"silu": lambda x: x.zero_()}),
    )
    one, two = (
        {record.site: record.xxh3 for record in run.records if ":in" in record.site}
        for run in (plain, wild)
    )
    assert one == two


def test_an_interrupted_suite_is_readable(tmp_path):
    """Ctrl-C leaves a run that opens, says so, and compares as far as it goes."""
    calls = 0

    def stop(x):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        return torch.nn.functional.silu(x)

    with pytest.raises(KeyboardInterrupt):
        capture(
            "suite:llm",
            out=tmp_path / "b",
            sites=["silu.float32*"],
            cases=CaseOptions(impl={"silu": stop}),
        )
    cut = Run.open(tmp_path / "b")
    assert cut.manifest.stopped_by == "interrupted"
    whole = capture("suite:llm", out=tmp_path / "a", sites=["silu.float32*"])
    report = compare(whole, cut)
    assert report.coverage.num_compared == 2
    assert report.verdict.confidence != "high"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "--dtype means nothing"),
        ({"prompts": ["x"]}, "--prompt means nothing"),
        ({"escalate": True}, "--escalate means nothing"),
        ({"plants": ["x:out=zero"]}, "--plant means nothing"),
        ({"impl": ["flash_attn_9"]}, "no operator has an implementation"),
        ({"impl": ["silu=flash_attn"]}, "silu has no implementation"),
        ({"impl": ["siluu=torch"]}, "no operator of a suite"),
        ({"impl": ["silu=no_such_module:f"]}, "cannot import"),
        ({"impl": ["silu=math:no_such"]}, "cannot import"),
        ({"impl": ["silu=math:pi"]}, "is not a function"),
    ],
)
def test_what_a_suite_does_not_take(options, words, tmp_path):
    """Options of models, and implementations that are not there, are refused beforehand."""
    with pytest.raises(UsageError, match=words):
        capture("suite:quick", out=tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_unknown_suites_and_models(quick, llama, tmp_path):
    """The known suites are named; --impl with a model and a model with a suite are errors."""
    run, truth = quick
    with pytest.raises(UsageError) as caught:
        capture("suite:vision", out=tmp_path / "a")
    assert "suite:llm" in caught.value.hint
    with pytest.raises(UsageError, match="--impl"):
        capture(llama, out=tmp_path / "a", cases=CaseOptions(impl=["torch_npu"]))
    with pytest.raises(UsageError, match="needs no model"):
        capture(llama, like=run, out=tmp_path / "a")
    with pytest.raises(UsageError, match="is a truth itself"):
        make_truth(truth, out=tmp_path / "a")
    with pytest.raises(UsageError, match="--model means nothing"):
        make_truth(run, out=tmp_path / "a", model="x")


def test_an_existing_run_is_kept(quick, tmp_path):
    """Never overwritten without force; never the run that is repeated."""
    run, _ = quick
    capture("suite:llm", out=tmp_path / "a", sites=FEW)
    with pytest.raises(RunExistsError):
        capture("suite:llm", out=tmp_path / "a", sites=FEW)
    capture("suite:llm", out=tmp_path / "a", sites=FEW, force=True)
    with pytest.raises(RunExistsError, match="is the run to be repeated"):
        capture(like=run, out=run.path, force=True)
    with pytest.raises(RunExistsError, match="is the run to be repeated"):
        make_truth(run, out=run.path, force=True)


def _no_operand(line):
    if line.get("call"):
        line["call"]["operands"][0]["site"] = "nowhere:in.x"


def _other_shape(line):
    if line.get("call"):
        line["call"]["operands"][0]["shape"] = [1, 2, 3]


def _bad_stride(line):
    if line.get("call"):
        line["call"]["operands"][0]["stride"] = [0] * len(line["call"]["operands"][0]["shape"])


def _no_such_number(line):
    if line.get("call"):
        name = next(iter(line["call"]["arguments"]))
        line["call"]["arguments"][name] = {"tensor": 99}


@pytest.mark.parametrize("change", [_no_operand, _other_shape, _bad_stride, _no_such_number])
def test_damaged_calls(change, quick, tmp_path):
    """A call that does not fit its operands is refused, with the site."""
    run, _ = quick
    damaged = edit_records(run, tmp_path / "damaged", change)
    with pytest.raises(RunFormatError, match="cannot be repeated"):
        capture(like=damaged, out=tmp_path / "b")


@pytest.mark.parametrize("name", ["attention_math", "rms_norm"])
def test_a_case_is_replayed_like_any_call(name, quick, tmp_path):
    """By the names of its definition: what runs may take any."""
    run, _ = quick
    again = replay(run, out=tmp_path / "again", sites=[f"{name}.float32.odd.normal*"])
    assert again.manifest.plan.skipped_operators == {}
    for record in again.records:
        assert record.xxh3 == run.at_site(record.site)[0].xxh3
    assert again.records


def test_operators_of_another_version(quick, tmp_path):
    """Operators that this version does not know are skipped and counted."""
    run, _ = quick

    def rename(line):
        if line.get("call") and line["call"]["operator"] == "suite.silu":
            line["call"]["operator"] = "suite.mish"

    other = edit_records(run, tmp_path / "other", rename)
    again = capture(like=other, out=tmp_path / "b", sites=["s*"])
    (reason,) = again.manifest.plan.skipped_operators
    assert "suite.mish" in reason


def test_implementations_by_name(quick, tmp_path, faulty, monkeypatch):
    """`llama` runs where it exists and is recorded; a module's function is found in the current
    directory; what is not installed says so and names what is."""
    run, truth = quick
    again = capture(
        like=run,
        out=tmp_path / "b",
        cases=CaseOptions(impl="llama"),
        sites=["rms_norm.*", "silu.*"],
    )
    notes = again.manifest.plan.modules
    assert notes["rms_norm.bfloat16.odd.normal"].kind == "llama"
    assert notes["silu.bfloat16.odd.normal"].kind == "torch"
    assert again.manifest.overrides[0].used == "llama"
    report = compare(run, again, truth=truth)
    assert report.verdict.kind == "within_floor"
    assert report.verdict.side is None
    (tmp_path / "my_kernels.py").write_text("def silu(x):\n    return x * 0\n")
    monkeypatch.chdir(tmp_path)
    mine = capture(
        like=run, out="c", cases=CaseOptions(impl=["silu=my_kernels:silu"]), sites=["silu.*"]
    )
    assert mine.manifest.plan.modules["silu.bfloat16.odd.normal"].kind == "my_kernels:silu"
    assert compare(run, mine, truth=truth).verdict.side == "candidate"
    with pytest.raises(UsageError, match="torch_npu is not here") as caught:
        capture(like=run, out="d", cases=CaseOptions(impl="torch_npu"))
    assert "llama (rms_norm)" in caught.value.hint


@pytest.mark.slow
def test_replays_of_a_suite(tmp_path):
    """`divergence replay` runs a suite's operators too, and is held to the suite's truth. The
    float64 replay does not say what rounding explains, so it is no truth of a suite."""
    run = capture("suite:llm", out=tmp_path / "a", sites=FEW)
    again = replay(run, out=tmp_path / "r")
    report = compare(run, again, truth=make_truth(run, out=tmp_path / "truth"))
    assert report.verdict.kind == "identical"
    assert not report.coverage.unmatched
    bare = replay(run, out=tmp_path / "bare", truth=True)
    with pytest.raises(UsageError, match="does not hold what a suite is judged by"):
        compare(run, again, truth=bare)


def _changed(run: Run, folder: Path, port: str, change) -> Path:
    """The cases of embedding and paged attention in float32, with other values at ``port``."""

    def changed(record, tensor):
        if record.site.startswith(("embedding.float32.decode", "paged_attention.float32.decode")):
            return change(tensor.clone()) if record.site.endswith(f":{port}") else tensor
        return None

    return by_hand.rewritten(run, folder, changed)


@pytest.mark.parametrize(
    ("port", "value", "left"),
    [
        ("in.ids", 1 << 20, "paged_attention"),
        ("in.ids", -1, "paged_attention"),
        ("in.block_tables", 1 << 20, "embedding"),
        ("in.block_tables", -(1 << 20), "embedding"),
        ("in.context_lens", 1 << 20, "embedding"),
        ("in.context_lens", -3, "embedding"),
    ],
)
def test_inputs_that_a_run_chose_lead_nowhere(quick, tmp_path, port, value, left):
    """Indices and lengths beyond what they point into: the case is left out of a repetition,
    before any vendor's kernel sees it, and there is no truth of it."""
    bad = _changed(quick[0], tmp_path / "bad", port, lambda one: one.fill_(value))
    seen = []

    def kernel(**arguments):
        seen.append(arguments)
        raise AssertionError("called")

    impl = {"embedding": kernel, "paged_attention": kernel}
    with pytest.raises(UsageError, match="nothing was recorded"):
        capture(like=bad, out=tmp_path / "b", cases=CaseOptions(impl=impl), probe=False)
    wanted = {"embedding": "ids", "paged_attention": "query"}[left]
    assert seen and all(wanted in arguments for arguments in seen)
    again = capture(like=bad, out=tmp_path / "c", probe=False)
    assert {one.site.partition(".")[0] for one in again.records} == {left}
    if value == -1:  # what a definition in Python takes for the last row
        return
    with pytest.raises(RunFormatError, match="is no case of"):
        make_truth(bad, out=tmp_path / "t")


def test_arguments_that_an_operator_does_not_have(quick, tmp_path):
    """They are called by no name of the run's."""

    def rename(line):
        call = line.get("call")
        if call and "x" in call["arguments"]:
            call["arguments"]["x; import os"] = call["arguments"].pop("x")

    bad = edit_records(quick[0], tmp_path / "bad", rename)
    for make in (capture, make_truth):
        given = {"like": bad, "sites": ["rms_norm.*"]} if make is capture else {"run": bad}
        with pytest.raises(RunFormatError, match="no argument 'x; import os'"):
            make(**given, out=tmp_path / make.__name__)
