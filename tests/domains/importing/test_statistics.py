"""Statistics and checksums of other tools: a fault is shown, health never."""

import csv
import json
import shutil
import tarfile
import zlib
from pathlib import Path

import pytest
import torch

from divergence import Run, compare, import_dump
from divergence.errors import DumpError
from tests.domains.importing.writers import forwards

HERE = Path(__file__).parent / "fixtures"
FAULT = "model.layers.1.mlp"
ATB = (
    "Device and PID,Execution Count,Op Name,Op Type,Op Id,Input/Output,Index,Dtype,Format,Shape,"
    "Max,Min,Mean,Norm,Tensor Path\n"
)


@pytest.fixture(scope="session")
def msprobe(tmp_path_factory) -> Path:
    """Dumps of the real tool: ``healthy``, ``faulty`` (a down_proj × 1.2), two of checksums."""
    folder = tmp_path_factory.mktemp("msprobe")
    with tarfile.open(HERE / "msprobe-statistics.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_the_default_task_of_msprobe_shows_a_fault(msprobe, tmp_path, told):
    """By its statistics at the module that makes it, and at none before."""
    a = import_dump(msprobe / "healthy", out=tmp_path / "a", progress=told)
    b = import_dump(msprobe / "faulty", out=tmp_path / "b")
    assert sum("no tensors" in note for note in told.notes) == 1
    report = compare(a, b)
    assert (report.verdict.kind, report.verdict.confidence) == ("drift", "medium")
    assert report.verdict.onset.site == "model.layers.1.mlp.down_proj:out"
    assert report.verdict.headline[0]["least"] == pytest.approx(0.2, rel=1e-3)
    again = json.loads(report.to_json())
    assert again["verdict"]["onset"]["site"] == "model.layers.1.mlp.down_proj:out"


def test_statistics_never_show_health(msprobe, tmp_path):
    """Equal to the last digit, and no pass: what would have been seen is said."""
    runs = [import_dump(msprobe / "healthy", out=tmp_path / name) for name in "ab"]
    report = compare(*runs)
    assert (report.verdict.kind, report.verdict.confidence) == ("undetermined", "low")
    (headline,) = report.verdict.headline
    assert headline.code == "blocks.statistics_show_nothing"
    assert 1e-7 < headline["smallest"] < headline["largest"] < 1e-3
    assert not any(site.identical for site in report.sites)


def test_a_direction_is_not_seen(captured, tmp_path):
    """A fault that keeps norms, means and extremes: nothing is claimed of it."""
    write_msprobe(captured, tmp_path / "a")
    write_msprobe(captured, tmp_path / "b", change=lambda site, x: x.flip(-1))
    runs = [import_dump(tmp_path / name, out=tmp_path / f"run-{name}") for name in "ab"]
    assert compare(*runs).verdict.headline[0].code == "blocks.statistics_show_nothing"


def test_equal_checksums_are_equal_bits(msprobe, captured, tmp_path):
    """md5 of msprobe is a crc32: equal is equal, also against a capture's bytes; xor proves
    nothing where it agrees."""
    runs = [import_dump(msprobe / "checksums", out=tmp_path / name) for name in "ab"]
    assert compare(*runs).verdict.kind == "identical"
    write_msprobe(captured, tmp_path / "crc", checksums=True)
    assert compare(captured, import_dump(tmp_path / "crc", out=tmp_path / "c")).verdict.kind == (
        "identical"
    )
    xor = [import_dump(msprobe / "xor", out=tmp_path / f"x{name}") for name in "ab"]
    report = compare(*xor)
    assert report.verdict.kind == "undetermined"
    assert not any(site.identical for site in report.sites)


def test_other_tokens_are_other_integers(captured, tmp_path):
    """Integers do not round: the first that differ are named."""
    change = {"model.embed_tokens:in": lambda x: x + 1}
    write_msprobe(captured, tmp_path / "a")
    write_msprobe(captured, tmp_path / "b", change=lambda site, x: change.get(site, lambda y: y)(x))
    runs = [import_dump(tmp_path / name, out=tmp_path / f"run-{name}") for name in "ab"]
    verdict = compare(*runs).verdict
    assert verdict.onset.site == "model.embed_tokens:in"
    assert verdict.headline[0].code == "blocks.other_integers"


def test_nan_check_names_the_first_module(captured, tmp_path):
    """The task nan_check says of a module whether it makes nan or inf, and no more."""
    write_msprobe(captured, tmp_path / "a", nan=())
    write_msprobe(captured, tmp_path / "b", nan=(FAULT, "model.norm"))
    runs = [import_dump(tmp_path / name, out=tmp_path / f"run-{name}") for name in "ab"]
    verdict = compare(*runs).verdict
    assert (verdict.kind, verdict.onset.site) == ("nonfinite", f"{FAULT}:out")
    assert verdict.headline[0].text.startswith(f"some nan in B first at {FAULT}:out")


def test_operators_of_level_l1_are_places_by_their_calls(captured, tmp_path, invoke):
    """``nan_check`` writes that level alone: what no module names is named by its operator."""
    for name in "ab":
        write_operators(captured, tmp_path / name, nan=3 if name == "b" else None)
        import_dump(tmp_path / name, out=tmp_path / f"run-{name}")
    code, out, _ = invoke("compare", tmp_path / "run-a", tmp_path / "run-b")
    assert code == 0
    assert out.startswith("NAN OR INF"), out
    assert "Functional.linear#4:out" in out


def test_prompts_of_statistics_are_those_of_tensors(captured, tmp_path):
    """A forward of more than one token begins a prompt, whether or not its ids are there."""
    write_msprobe(captured, tmp_path / "dump")
    shutil.copytree(tmp_path / "dump" / "step0", tmp_path / "dump" / "step99")
    last = max(int(p.name[4:]) for p in (tmp_path / "dump").iterdir() if p.name != "step99")
    (tmp_path / "dump" / "step99").rename(tmp_path / "dump" / f"step{last + 1}")
    tokens = import_dump(tmp_path / "dump", out=tmp_path / "run").manifest.tokens
    assert len(tokens.samples) == 2


def test_numbers_of_few_digits_do_not_hide_a_fault(captured, faulty, tmp_path):
    """Ids and masks are printed short; one program's numbers have as many digits all the same."""
    ids = "Module.model.embed_tokens.Class.forward.0.input.0"
    row = [ids, ids, "torch.int64", "torch.int64", *["[1, 9]"] * 2, *["7", "0", "3", "9"] * 2]
    write_msprobe_csv(captured, faulty, tmp_path / "a", more=[*row, "0.0", "pass", ""])
    runs = [
        import_dump(tmp_path / "a", out=tmp_path / layout, layout=layout)
        for layout in ("compared-a", "compared-b")
    ]
    assert all(run.manifest.plan.statistics_off < 1e-4 for run in runs)
    assert compare(*runs).verdict.kind == "drift"


def test_captured_graphs_lie_under_their_process(captured, tmp_path):
    """ACLGraph: step0/pid9527/dump_tensor_data, a file a tensor, and no dump.json."""
    write_graph(captured, tmp_path / "dump")
    run = import_dump(tmp_path / "dump", out=tmp_path / "b", like=captured)
    assert compare(captured, run).verdict.kind == "identical"


FORMS = {}


def form(write):
    FORMS[write.__name__.removeprefix("write_")] = write
    return write


@pytest.mark.parametrize("name", ["atb", "torchtitan", "engine", "sglang", "msprobe_csv"])
def test_each_form_shows_a_fault_at_its_module(name, captured, faulty, tmp_path):
    """A line of statistics a tensor, in each tool's own form."""
    layouts = "auto", "auto"
    if name in ("sglang", "msprobe_csv"):  # one file of both sides
        FORMS[name](captured, faulty, tmp_path / "a")
        paths, layouts = [tmp_path / "a"] * 2, ("auto", "compared-b")
    else:
        paths = [tmp_path / "a", tmp_path / "b"]
        for run, path in zip((captured, faulty), paths, strict=True):
            FORMS[name](run, path)
    runs = [
        import_dump(path, out=tmp_path / f"run-{n}", layout=layout)
        for n, (path, layout) in enumerate(zip(paths, layouts, strict=True))
    ]
    verdict = compare(*runs).verdict
    assert verdict.kind == "drift", verdict.summary
    site = verdict.onset.site
    block = ("model.layers.1:out", "model.layers.2:in", "model.layers.1.15.0:out")
    assert site.startswith(FAULT) or site in block, site


@pytest.mark.parametrize(
    "name, text, words",
    [
        (
            "statistic.csv",
            "Device and PID,Execution Count,Op Name,Op Id,Input/Output,Index,Dtype\na,0",
            "not as many cells",
        ),
        (
            "statistic.csv",  # of the task "tensor"
            f"{ATB}0_7,0,A,A,2_0,output,0,bf16,nd,2x3,N/A,N/A,N/A,N/A,/x/outtensor0.bin\n",
            "no line holds",
        ),
        (
            "statistic.csv",
            ATB + "".join(f"0_{n},0,A,A,2,output,0,bf16,nd,2,1,1,1,1,N/A\n" for n in (7, 8)),
            "several processes on device 0",
        ),
        (
            "rank_0_activations.log",
            "[a/op_0_mm]\nShape: torch.Size([2]), Dtype: torch.what\n",
            "no line holds",
        ),
    ],
)
def test_what_is_damaged_is_refused(name, text, words, tmp_path):
    """With its place, and no run behind it."""
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / name).write_text(text)
    with pytest.raises(DumpError, match=words):
        import_dump(tmp_path / "dump", out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_iterations_of_a_training_are_aligned_by_their_numbers(captured, tmp_path):
    """Two logs of which one begins later: what both have is compared, and the rest is told."""
    runs = {}
    for name, iterations in (("a", (5, 10, 15)), ("b", (10, 15, 20)), ("wrong", (15,))):
        write_iterations(iterations, tmp_path / f"log-{name}", fault=1.3 if name == "wrong" else 1)
        runs[name] = import_dump(tmp_path / f"log-{name}", out=tmp_path / name)
    report = compare(runs["a"], runs["b"])
    assert report.verdict.headline[0].code == "blocks.statistics_show_nothing"
    assert {site.step for site in report.sites} == {10, 15} and len(report.sites) == 4
    assert report.coverage.num_only_reference == report.coverage.num_only_candidate == 2
    onset = compare(runs["b"], runs["wrong"]).verdict.onset
    assert (onset.site, onset.step) == ("layers.1.mlp:out", 15)


def test_rounds_of_atb_are_aligned_by_their_numbers(tmp_path):
    """One dump begins later: its first round is no prefill, and what both have is compared."""
    runs = []
    for name, rounds in (("a", range(4)), ("b", range(2, 6))):
        for number in rounds:
            place = tmp_path / name / "data" / "0_7" / str(number)
            place.mkdir(parents=True)
            row = f"0_7,{number},mlp,X,0,output,0,float,nd,2x3,{number}.5,0.25,0.5,{number}.5,N/A\n"
            (place / "statistic.csv").write_text(ATB + row)
        runs.append(import_dump(tmp_path / name, out=tmp_path / f"{name}-run"))
    report = compare(*runs)
    assert {site.step for site in report.sites} == {2, 3}
    assert report.verdict.headline[0].code == "blocks.statistics_show_nothing"


@pytest.mark.parametrize("name", ["sglang", "msprobe_csv"])
def test_a_distance_shows_what_statistics_do_not(name, captured, tmp_path):
    """Tokens change places: norms, means and extremes stay, and both tools passed it. What rounding
    makes is no fault."""

    def turned(path, tensor):
        return tensor.flip(1) if path == FAULT.removesuffix(":out") else tensor

    for wrong, change in ((False, lambda path, y: y * (1 + 2**-23)), (True, turned)):
        FORMS[name](captured, captured, tmp_path / f"told-{wrong}", change=change)
        runs = [
            import_dump(tmp_path / f"told-{wrong}", out=tmp_path / f"{side}-{wrong}", layout=side)
            for side in ("compared-a", "compared-b")
        ]
        verdict = compare(*runs).verdict
        assert verdict.kind == ("drift" if wrong else "undetermined"), verdict.summary
    assert verdict.onset.site.startswith(FAULT.removesuffix(":out"))
    assert "at least" in verdict.summary


def test_a_number_that_json_has_not_is_nan(captured, tmp_path):
    """SGLang's comparator writes null for it, on the side that has it."""

    def broken(path, tensor):
        return (
            tensor * torch.nan if path.startswith(("model.layers.1.mlp", "model.norm")) else tensor
        )

    write_sglang(captured, captured, tmp_path / "told", change=broken)
    runs = [
        import_dump(tmp_path / "told", out=tmp_path / side, layout=side)
        for side in ("compared-a", "compared-b")
    ]
    verdict = compare(*runs).verdict
    assert (verdict.kind, verdict.side) == ("nonfinite", "candidate")
    assert verdict.onset.site.startswith("model.layers.1.mlp")


def test_inputs_by_name_of_msprobes_comparison(captured, tmp_path):
    """``kwargs.NAME``, where the dumps held tensors."""
    name = "Module.model.layers.0.self_attn.Class.forward.0.kwargs.position_embeddings.0"
    row = [name, name, *["torch.float32"] * 2, *["[1, 9]"] * 2, *["7", "0", "3", "9"] * 2]
    write_msprobe_csv(captured, captured, tmp_path / "told", more=[*row, "0.0", "pass", ""])
    run = import_dump(tmp_path / "told", out=tmp_path / "run")
    sites = {record.site for record in run.records}
    assert "model.layers.0.self_attn:in" in sites


def test_one_step_or_file_of_msprobe(msprobe, tmp_path):
    """What its users name first."""
    (step,) = (msprobe / "healthy").rglob("step0")
    (rank,) = step.iterdir()
    for place in (step, rank, rank / "dump.json"):
        run = import_dump(place, out=tmp_path / "run", force=True)
        assert "model.layers.1:out" in {record.site for record in run.records}


# What the tools write, of a run of the same forward.


def leaf_of(tensor: torch.Tensor, *, checksums: bool = False) -> dict:
    """As msprobe has it: Mean and Norm in the tensor's own dtype, of floats alone."""
    leaf = {
        "type": "torch.Tensor",
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "Max": tensor.max().item(),
        "Min": tensor.min().item(),
        "Mean": None,
        "Norm": None,
        "requires_grad": False,
    }
    if tensor.is_floating_point():
        leaf |= {"Mean": tensor.mean().item(), "Norm": tensor.norm().item()}
    if checksums:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        leaf["md5"] = f"{zlib.crc32(data):08x}"
    return leaf


def modules_of(run: Run) -> list[tuple[int, str, dict[str, torch.Tensor]]]:
    """(step, module path, tensors by port), in the order in which modules end."""
    every = []
    for step, held in enumerate(forwards(run)):
        modules: dict[str, dict[str, torch.Tensor]] = {}
        for site, tensor in held.items():
            path, _, port = site.rpartition(":")
            modules.setdefault(path, {})[port] = tensor
        every += [(step, path, ports) for path, ports in modules.items()]
    return every


def write_msprobe(run, folder, *, change=lambda site, x: x, checksums=False, nan=None):
    steps: dict[int, dict] = {}
    for step, path, ports in modules_of(run):
        tensors = {port: change(f"{path}:{port}", tensor) for port, tensor in ports.items()}
        leaves = {port: leaf_of(tensor, checksums=checksums) for port, tensor in tensors.items()}
        if nan is not None:
            keys = ("type", "dtype", "shape")
            leaves = {port: {k: leaf[k] for k in keys} for port, leaf in leaves.items()}
        entry = {
            "input_args": [leaf for port, leaf in leaves.items() if port == "in"],
            "input_kwargs": {p[3:]: leaf for p, leaf in leaves.items() if p.startswith("in.")},
            "output": [leaf for port, leaf in leaves.items() if port.startswith("out")],
        }
        if nan is not None:
            entry["is_nan"] = int(path in nan)
        name = "." if path == "." else path
        steps.setdefault(step, {})[f"Module.{name}.Class.forward.0"] = entry
    for step, data in steps.items():
        place = folder / f"step{step}" / "proc7"
        place.mkdir(parents=True)
        task = "statistics" if nan is None else "nan_check"
        (place / "dump.json").write_text(json.dumps({"task": task, "level": "L0", "data": data}))


def write_operators(run, folder, *, nan):
    """After msprobe's data_processor: level L1, operators by the number of their call."""
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1, 4]}
    data = {
        f"Functional.linear.{number}.forward": {
            "input_args": [leaf],
            "input_kwargs": {},
            "output": [leaf],
            "is_nan": int(nan is not None and number >= nan),
        }
        for number in range(6)
    }
    place = folder / "step0" / "proc7"
    place.mkdir(parents=True)
    (place / "dump.json").write_text(json.dumps({"task": "nan_check", "level": "L1", "data": data}))


def write_graph(run, folder):
    for step, path, ports in modules_of(run):
        place = folder / f"step{step}" / "pid9527" / "dump_tensor_data"
        place.mkdir(parents=True, exist_ok=True)
        for port, tensor in ports.items():
            side, _, rest = port.partition(".")
            name = {"in": "input", "out": "output"}[side]
            if path != ".":
                torch.save(tensor, place / f"Module.{path}.Class.0.{name}.{rest or 0}.pt")


def outputs_of(run) -> list[tuple[int, str, torch.Tensor]]:
    return [
        (step, path, ports["out"])
        for step, path, ports in modules_of(run)
        if "out" in ports and ports["out"].is_floating_point() and path not in (".", "model")
    ]


@form
def write_atb(run, folder):
    """A file of each round, whose lines several threads write: in no order."""
    lines: dict[int, list[str]] = {}
    for number, (step, path, x) in enumerate(outputs_of(run)):
        figures = ",".join(f"{float(v):.6f}" for v in (x.max(), x.min(), x.mean(), x.norm()))
        shape, name = "x".join(map(str, x.shape)), path.replace(".", "/")
        lines.setdefault(step, []).insert(
            0, f"0_39943,{step},{name},X,{number}_0,output,0_y,float,nd,{shape},{figures},N/A\n"
        )
    for step, rows in lines.items():
        place = folder / "data" / "0_39943" / str(step)
        place.mkdir(parents=True)
        (place / "statistic.csv").write_text(ATB + "".join(rows))


@form
def write_torchtitan(run, folder):
    folder.mkdir()
    lines = []
    for step, path, x in outputs_of(run):
        if step == 0:
            lines += [
                f"[{path}/op_0_mm]",
                f"Shape: {x.shape}, Dtype: {x.dtype}",
                f"L1 norm: {x.abs().sum():.3g}",
                f"L2 norm: {x.norm():.3g}",
                f"Min: {x.min():.3g}",
                f"Max: {x.max():.3g}",
                "Location: a.py:5",
                "Phase: forward",
                "",
            ]
    (folder / "rank_0_activations.log").write_text("\n".join(lines))


@form
def write_engine(run, folder):
    place = folder / "nvdlfw_inspect_statistics_logs"
    place.mkdir(parents=True)
    lines = []
    for step, path, x in outputs_of(run):
        for name, value in (("std", x.std()), ("mean", x.mean()), ("l2_norm", x.norm())):
            lines.append(
                f"2026-01-01 00:00:00,000 - INFO - {path}_output_{name} \t\t\t\t "
                f"iteration={step:06d} \t\t\t\t value={value:.8f}"
            )
    (place / "nvdlfw_inspect_globalrank-0.log").write_text("\n".join(lines))


def write_iterations(iterations, folder, fault):
    """Transformer Engine's of two modules, each iteration with an input of its own."""
    folder.mkdir()
    lines = [
        f"layers.{block}.mlp_output_{what} iteration={number:06d} value={value:.8f}"
        for number in iterations
        for block in range(2)
        for what, value in (("std", number * fault**block), ("mean", 0.5))
    ]
    (folder / "nvdlfw_inspect_globalrank-0.log").write_text("\n".join(lines))


@form
def write_sglang(run, other, folder, change=lambda path, y: y):
    """The comparator's report."""
    folder.mkdir()
    lines = [{"type": "config", "config": {}}]
    for (step, path, x), (_, _, y) in zip(outputs_of(run), outputs_of(other), strict=True):
        y = change(path, y)
        wide = x.double(), y.double()
        apart = 1 - 2 * (wide[0] * wide[1]).sum() / (wide[0] ** 2 + wide[1] ** 2).sum()
        sides = [
            {
                "shape": list(t.shape),
                "dtype": str(t.dtype),
                "stats": {
                    name: value.item() if value.isfinite() else None
                    for name, value in (
                        ("mean", t.mean()),
                        ("abs_mean", t.abs().mean()),
                        ("std", t.std()),
                        ("min", t.min()),
                        ("max", t.max()),
                    )
                },
            }
            for t in (x, y)
        ]
        lines.append(
            {
                "type": "comparison",
                "name": f"non_intrusive__{path}.output",
                "location": {"step": step},
                "baseline": sides[0],
                "target": sides[1],
                "shape_mismatch": False,
                "diff": {"rel_diff": apart.item(), "passed": True},
            }
        )
    lines.append({"type": "summary", "total": len(lines), "passed": len(lines)})
    (folder / "report.jsonl").write_text("\n".join(map(json.dumps, lines)))


@form
def write_msprobe_csv(run, other, folder, change=lambda path, y: y, more=()):
    """``msprobe compare`` of two tensors: the first run is the bench."""
    folder.mkdir()
    with (folder / "compare_result_20260101000000.csv").open("w", newline="") as file:
        out = csv.writer(file)
        stats = ["max", "min", "mean", "l2norm"]
        out.writerow(
            [
                "NPU Name",
                "Bench Name",
                "NPU Dtype",
                "Bench Dtype",
                "NPU Tensor Shape",
                "Bench Tensor Shape",
                *[f"NPU {s}" for s in stats],
                *[f"Bench {s}" for s in stats],
                "EucDist",
                "Result",
                "Err_message",
            ]
        )
        out.writerows([more] if more else [])
        for (step, path, x), (_, _, y) in zip(outputs_of(run), outputs_of(other), strict=True):
            y = change(path, y)
            if step == 0:
                name = f"Module.{path}.Class.forward.0.output.0"
                out.writerow(
                    [
                        name,
                        name,
                        y.dtype,
                        x.dtype,
                        list(y.shape),
                        list(x.shape),
                        *[
                            value.item()
                            for t in (y, x)
                            for value in (t.max(), t.min(), t.mean(), t.norm())
                        ],
                        f"{(x - y).double().norm():.6g}",
                        "pass",
                        "",
                    ]
                )
