"""Dumps that were made to harm whoever imports them: each is refused by its name."""

import collections
import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from divergence import Run
from divergence.cli.main import app
from divergence.run.foreign import DumpFolder
from tests.domains.importing.test_scores import LINES

MAP = (
    '[[file]]\npattern = "{name}.npy"\nsite = "{name}:out"\n'
    '[[key]]\npattern = "{name}"\nsite = "{name}:out"\n'
)


class Call:
    """A call that a pickle asks for."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Stored:
    """A storage that a pickle names."""

    def __init__(self, key: str = "0", kind: Any = torch.FloatStorage) -> None:
        self.key, self.kind = key, kind


class Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        return ("storage", item.kind, item.key, "cpu", 4) if isinstance(item, Stored) else None


class Subclass(torch.Tensor):
    pass


def tensor(*shape: object, stride: object = (), offset: object = 0, **options: Any) -> Call:
    return Call(
        torch._utils._rebuild_tensor_v2,
        Stored(**options),
        offset,
        shape,
        stride or (1,) * len(shape),
        False,
        collections.OrderedDict(),
    )


def archive(path: Path, value: object, *, method: int = 0, **members: bytes) -> None:
    """A file like those of torch.save; ``value`` may be the bytes of a pickle."""
    buffer = io.BytesIO()
    if not isinstance(value, bytes):
        Pickler(buffer, 2).dump(value)
        value = buffer.getvalue()
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in {
            "data.pkl": value,
            "byteorder": b"little",
            "data/0": bytes(16),
            **members,
        }.items():
            file.writestr(f"x/{name}", data)


def patched(path: Path, before: bytes, after: bytes, *, first: int = 0) -> None:
    """Replaces bytes behind the first ones."""
    data = path.read_bytes()
    assert before in data[first:]
    path.write_bytes(data[:first] + data[first:].replace(before, after))


def central(path: Path, place: int, value: bytes) -> None:
    """Changes a field of the last entry of a zip's directory."""
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\1\2")
    data[entry + place : entry + place + len(value)] = value
    path.write_bytes(data)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def twice(path: Path) -> None:
    archive(path, {"a": tensor(4)})
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning):
        file.writestr("x/data.pkl", b"x")


def npy(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data)


def shaped(path: Path, shape: str, descr: str = "<f4") -> None:
    npy(path, f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n".encode())


def holes(path: Path, head: bytes, size: int = 40 << 30) -> None:
    path.write_bytes(head)
    os.truncate(path, size)


def safe(path: Path, header: object) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def entry(**fields: object) -> dict:
    return {"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | fields}


def many(folder: Path) -> None:
    """Each would be allowed alone."""
    for number in range(60):
        torch.save({f"a{number}": torch.zeros(1).expand(5 << 20)}, folder / f"{number}.pt")


def stored(make: Callable[[], object]) -> Callable[[Path], None]:
    return lambda path: torch.save({"a": make()}, path)


def loop() -> list:
    items: list = []
    items.append(items)
    return items


def shared(item: object) -> object:
    for _ in range(40):
        item = [item, item]
    return item


HUGE = (2**40, 2**40)
TENSORS = {
    "many files.pt": (lambda p: many(p.parent), "more than is unpacked"),
    "spread.pt": (stored(lambda: torch.zeros(1).expand(1 << 40)), "unpacked"),
    "views.pt": (lambda p: torch.save([torch.zeros(1 << 16).expand(4096, -1)] * 60, p), "unpacked"),
    "holes.pt": (lambda p: holes(p, b"PK\3\4"), "unpacked"),
    "loop.pt": (stored(loop), "holds itself"),
    "shared.pt": (stored(lambda: shared(torch.ones(1))), "values"),
    "deep.pt": (lambda p: archive(p, b"\x80\2" + b"]" * 9999 + b"a" * 9998 + b"."), "deep"),
    "steps.pt": (lambda p: archive(p, b"\x80\2" + b"}" * 100_001 + b"."), "steps"),
    "keys.pt": (lambda p: archive(p, {n * (2**61 - 1): 1 for n in range(9)}), "key"),
    "counter.pt": (lambda p: archive(p, Call(collections.Counter, 2**40)), "which is code"),
    "codec.pt": (lambda p: archive(p, Call(os.system, "touch pwned")), "which is code"),
    "pickled.pt": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "could run code"),
    "conj.pt": (stored(lambda: torch.ones(2, dtype=torch.cfloat).conj()), "conjugated"),
    "neg.pt": (stored(lambda: torch.ones(2, dtype=torch.cfloat).conj().imag), "negated"),
    "nested.pt": (stored(lambda: torch.nested.nested_tensor([torch.ones(2)])), "nested"),
    "meta.pt": (stored(lambda: torch.ones(2, device="meta")), "empty tensor"),
    "subclass.pt": (stored(lambda: torch.ones(2).as_subclass(Subclass)), "a class of its own"),
    "quantised.pt": (
        stored(lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)),
        "quantised",
    ),
    "offset.pt": (lambda p: archive(p, {"a": tensor(4, offset=1)}), "element 5 of 4"),
    "stride.pt": (lambda p: archive(p, {"a": tensor(2, stride=(-1,), offset=3)}), "negative"),
    "negative.pt": (lambda p: archive(p, {"a": tensor(-2)}), "negative"),
    "wide.pt": (lambda p: archive(p, {"a": tensor(*HUGE, stride=HUGE)}), "element"),
    "hollow.pt": (lambda p: archive(p, {"a": tensor(0, 2**62)}), "shape"),
    "axes.pt": (lambda p: archive(p, {"a": tensor(*[1] * 99)}), "axes"),
    "letters.pt": (lambda p: archive(p, {"a": tensor("4")}), "negative or no integers"),
    "elsewhere.pt": (lambda p: archive(p, {"a": tensor(4, key="../data.pkl")}), "no storage"),
    "missing.pt": (lambda p: archive(p, {"a": tensor(4, key="7")}), "missing"),
    "name.pt": (lambda p: archive(p, {"a" * 2000: tensor(4)}), "2,000 letters"),
    "names.pt": (lambda p: archive(p, {"a" * 900: {"b" * 900: tensor(4)}}), "1,801 letters"),
    "big.pt": (lambda p: archive(p, {"a": tensor(4)}, byteorder=b"big"), "big-endian"),
    "cut.pt": (lambda p: archive(p, b"\x80\2}"), "it is not as torch.save writes it"),
    "empty.pt": (lambda p: archive(p, b"\x80\2."), "it is not as torch.save writes it"),
    "huge int.pt": (lambda p: archive(p, b"\x80\2\x8b" + b"\xff" * 4 + b"."), "torch.save"),
    "sparse.pt": (stored(lambda: torch.eye(2).to_sparse()), "sparse"),
    "packed.pt": (lambda p: archive(p, {}, method=zipfile.ZIP_DEFLATED), "compressed members"),
    "zip.pt": (lambda p: zipfile.ZipFile(p, "w").close(), "0 members called data.pkl"),
    "twice.pt": (twice, "twice"),
    "encrypted.pt": (lambda p: (archive(p, {}), central(p, 8, b"\1")), "encrypted"),
    "method.pt": (lambda p: (archive(p, {}), central(p, 10, b"\x63")), "method 99"),
    "sizes.pt": (lambda p: (archive(p, {}), central(p, 24, b"\xff\xff\xff\x7f")), "two sizes"),
    "beyond.pt": (lambda p: (archive(p, {}), central(p, 20, b"\xff\xff\xff\x7f" * 2)), "cut off"),
    "zip64.pt": (lambda p: (archive(p, {}), central(p, 20, b"\xff" * 8)), "cannot be read"),
    "over.pt": (lambda p: (archive(p, {}), central(p, 42, bytes(4))), "overlaps"),
    "up.pt": (lambda p: archive(p, {}, **{"../../up": b"x"}), "no run has"),
    "half.pt": (lambda p: (torch.save(torch.ones(99), p), half(p)), "cut off"),
    "half.npy": (lambda p: (numpy.save(p, numpy.arange(99.0)), half(p)), "one array"),
    "half.safetensors": (lambda p: (save_file({"x": torch.ones(99)}, p), half(p)), "cut off"),
    "touched.pt": (Path.touch, "is empty"),
    "touched.npy": (Path.touch, "is empty"),
    "brackets.npy": (lambda p: npy(p, b"[" * 9000), "one array"),
    "minus.npy": (lambda p: npy(p, b"{'shape': (" + b"-" * 9000), "one array"),
    "long.npy": (lambda p: npy(p, b"{" + b" " * 60_000), "one array"),
    "less.npy": (lambda p: shaped(p, "-4,"), "one array"),
    "digits.npy": (lambda p: shaped(p, "9" * 5000), "as numpy.save writes it"),
    "more.npy": (lambda p: shaped(p, "4,"), "16 bytes"),
    "none.npy": (lambda p: shaped(p, f"0, {2**62}, {2**62}"), "as numpy.save writes it"),
    "axes.npy": (lambda p: shaped(p, "0," * 70), "as numpy.save writes it"),
    "dtype.npy": (lambda p: shaped(p, "0,", "<f3"), "as numpy.save writes it"),
    "text.npy": (lambda p: shaped(p, "0,", "<U4"), "one array"),
    "objects.npy": (lambda p: numpy.save(p, numpy.array([{}], object)), "one array"),
    "zip.npy": (lambda p: zipfile.ZipFile(p, "w").close(), "archive of several"),
    "holes.npy": (
        lambda p: (shaped(p, f"{10 << 30},"), os.truncate(p, (40 << 30) + 128)),
        "more than is unpacked",
    ),
    "huge.safetensors": (lambda p: p.write_bytes(struct.pack("<Q", 1 << 60)), "header of"),
    "shape.safetensors": (lambda p: safe(p, entry(shape=[0, 2**62, 2**62])), "safetensors writes"),
    "less.safetensors": (lambda p: safe(p, entry(shape=[-1, 0])), "shape [-1, 0]"),
    "kind.safetensors": (lambda p: safe(p, entry(dtype="F33")), "F33"),
    "list.safetensors": (lambda p: safe(p, [entry()]), "not a JSON object"),
    "values.safetensors": (
        lambda p: safe(p, b'{"__metadata__":[' + b"[]," * 10_000_001 + b"0]}"),
        "values",
    ),
    "deep.safetensors": (lambda p: safe(p, b'{"__metadata__":' + b"[" * 99_999), "deep"),
    "over.safetensors": (
        lambda p: save_file({"x": torch.ones(2)}, p) or patched(p, b"[0,8]", b"[0,9]"),
        "cut off",
    ),
    "name.safetensors": (lambda p: save_file({"x" * 1001: torch.ones(2)}, p), "1,001 letters"),
    "pipe.npy": (os.mkfifo, "pipe"),
    "link.npy": (lambda p: p.symlink_to("/etc/passwd"), "link"),
}
"""By name: a file that is the dump, or lies in it, and what is said of it."""


def msprobe(entry: object, **described: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        place = folder / "step0" / "rank0"
        (place / "dump_tensor_data").mkdir(parents=True)
        torch.save(torch.ones(2), place / "dump_tensor_data" / "a.pt")
        data = (
            entry
            if isinstance(entry, dict) and "Module.a.A.forward.0" in entry
            else {"Module.a.A.forward.0": entry}
        )
        value = {"task": "tensor", "data": data} | described
        (place / "dump.json").write_text(json.dumps(value))

    return write


def named(*files: str) -> dict:
    return {"output": [{"data_name": file} for file in files]}


def sglang(*names: str, value: object = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"a": torch.ones(2)} if value is None else value, path)

    return write


def debugger(tree: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "M_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))
        save_file({"data": torch.ones(2)}, folder / "M_inputs_args_0.safetensors")

    return write


def node(file: object) -> dict:
    leaf = {"shape": 1, "dtype": 1, "value": file}
    return {"module_path": "M", "inputs": {"args": [leaf]}, "outputs": leaf}


def rollout(**fields: object) -> Callable[[Path], None]:
    return text("r.jsonl", json.dumps(LINES["slime"] | fields))


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda folder: folder.joinpath(name).write_bytes(data) and None


SAMPLE = {"doc_id": 0, "arguments": [["a", "b"]], "resps": [[["-1", "True"]]]}


def sampled(**fields: object) -> Callable[[Path], None]:
    """lm-eval's line of one document."""
    return text("s.jsonl", json.dumps(SAMPLE | fields))


def likeliest(num: int, tokens: object) -> Callable[[Path], None]:
    """TRL's line of an answer with the likeliest tokens of each place."""
    line = {"prompt_ids": [], "completion_ids": [1] * num, "logprobs": [-1] * num}
    return text("r.jsonl", json.dumps(line | {"top_logprobs": tokens}))


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """A dump of msprobe, one of its folders under another name."""
    return lambda folder: (msprobe(named("a.pt"))(folder), os.rename(folder / old, folder / new))


def kld(*numbers: int, size: int = 4096) -> Callable[[Path], None]:
    head = b"_logits_" + struct.pack("<Iii", *numbers)
    return lambda folder: holes(folder / "base.kld", head, size)


PLACE = "TP0_PP0_Rank0_pid1/Pass00000.pt"
TAGS = "step=0___rank=0___dump_index=1___name=a.pt"

FOLDERS = {
    "msprobe args": (msprobe({"input_args": 5}), "dump.json", "as msprobe writes it"),
    "msprobe kwargs": (msprobe({"input_kwargs": "ab"}), "dump.json", "as msprobe writes it"),
    "msprobe nul": (msprobe(named("a\0.pt")), "dump", "leads out"),
    "msprobe up": (msprobe(named("../a.pt")), "dump.json", "names no file"),
    "msprobe type": (msprobe(named(["x"] * 999)), "dump.json", "names no file"),
    "msprobe twice": (msprobe(named("a.pt", "a.pt")), "dump.json", "named twice"),
    "msprobe long": (msprobe(named("a" * 300 + ".pt")), "dump", "cannot be read"),
    "msprobe dots": (
        msprobe({"Module.a.A.forward.0": {}, "Module." + "a." * 200_000 + "A.forward.0": {}}),
        "dump.json",
        "400,018 letters",
    ),
    "msprobe keys": (
        msprobe({"output": {"k" * 999: {"l" * 99: [{"data_name": "a.pt"}]}}}),
        "dump.json",
        "letters",
    ),
    "msprobe list": (msprobe({}, data=[]), "dump.json", "no dump.json"),
    "msprobe null": (msprobe({}, data=None), "dump.json", "no dump.json"),
    "msprobe params": (msprobe({"parameters": 7}), "dump.json", "as msprobe writes it"),
    "msprobe deep": (text("step0.json", "["), "dump/step0.json", "it is no JSON"),
    "msprobe step": (renamed("step0", "step999999999"), "dump", "step 0 is missing"),
    "msprobe rank": (
        renamed("step0/rank0", f"step0/rank{'9' * 200}"),
        "dump",
        "rank 0 is missing",
    ),
    "sglang pass": (sglang(PLACE, PLACE.replace("00000", "999999999")), "TP0", "Pass00001.pt is"),
    "sglang ranks": (
        sglang(PLACE, PLACE.replace("TP0_PP0", "TP999999_PP999999")),
        "dump",
        "TP1 PP0 is missing",
    ),
    "sglang list": (sglang(PLACE, value=[1]), "Pass00000.pt", "no tensors by name"),
    "sglang lengths": (
        sglang(PLACE, value={"m.forward_batch_info.seq_lens": torch.ones(9)}),
        "Pass00000.pt",
        "9 sequences",
    ),
    "sglang names": (sglang(PLACE, value={"a" * 2000: torch.ones(2)}), "Pass", "2,000 letters"),
    "dumper index": (sglang(TAGS.replace("=1_", "=x_")), "step=0", "not numbers in its name"),
    "dumper step": (sglang(TAGS.replace(".pt", "___step=x.pt")), "step=0", "not numbers"),
    "dumper world": (
        sglang(TAGS, value={"value": torch.ones(2), "meta": {"world_size": 2**62}}),
        "step=0",
        "rank 1 is missing",
    ),
    "debugger up": (debugger(node("./../../etc/passwd")), "M_debug", "outside the folder"),
    "debugger root": (debugger(node("/etc/passwd")), "M_debug", "outside the folder"),
    "debugger dots": (debugger(node("./..")), "dump", "leads out"),
    "debugger nul": (debugger(node("./a\0.safetensors")), "dump", "leads out"),
    "debugger form": (debugger(node("./M_debug_tree_FULL_TENSORS.json")), "FULL", "none of torch"),
    "debugger children": (debugger(node("./a") | {"children": 7}), "M_debug", "debugger writes it"),
    "debugger list": (debugger([]), "M_debug", "no tree"),
    "lines deep": (text("r.jsonl", "[" * 10**6), "r.jsonl, line 1", "deep"),
    "lines wide": (text("r.jsonl", b"[" + b"[]," * 10_000_001 + b"0]"), "line 1", "values"),
    "lines hidden": (  # an escaped quote of UTF-16 is none of its bytes
        text("r.jsonl", ('["\\"' + '","' * 9 + '",' + "[" * 999).encode("utf-16-le")),
        "line 1",
        "",
    ),
    "lines digits": (text("r.jsonl", "9" * 5000), "r.jsonl, line 1", "no JSON"),
    "lines number": (rollout(rollout_log_probs=[10**400, -1, -1]), "r.jsonl, line 1", "log-prob"),
    "lines text": (rollout(rollout_log_probs=[[], -1, -1]), "r.jsonl, line 1", "no number"),
    "lines token": (rollout(tokens=[2**70] * 6), "r.jsonl, line 1", "no token id"),
    "lines length": (rollout(response_length=-(2**70)), "r.jsonl, line 1", "of 6 tokens"),
    "lines nul": (text("r.jsonl", bytes(999)), "r.jsonl, line 1", "no JSON"),
    "top wide": (
        likeliest(5000, [[[1, -1]] * 5000, *[[]] * 4999]),
        "r.jsonl, line 1",
        "likeliest ones",
    ),
    "top endless": (likeliest(1, [{"1": math.nan, "2": 1e999}]), "r.jsonl, line 1", "log-prob"),
    "lm-eval numbers": (sampled(resps=[[[10**400, "x"]]]), "s.jsonl, line 1", "writes it"),
    "lm-eval requests": (sampled(arguments=7), "s.jsonl, line 1", "not of one length"),
    "kld holes": (kld(1 << 22, 1 << 22, 9999, size=40 << 30), "base.kld", "unpacked"),
    "kld negative": (kld(512, -5, -5), "base.kld", "a context of 512"),
    "kld large": (kld(1 << 22, 1 << 22, 2**31 - 1), "base.kld", "cut off"),
    "kld short": (lambda p: (p / "base.kld").write_bytes(b"_logits_"), "base.kld", "cut off"),
    "pipe within": (lambda p: (rollout()(p), os.mkfifo(p / "pipe")), "pipe", "pipe"),
    "link to folder": (lambda p: (rollout()(p), (p / "up").symlink_to(p)), "up", "link"),
}
"""By name: what writes the folder, what the error names, and what it says."""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Imports a dump that is refused; the error. Nothing was written or run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "map.toml").write_text(MAP)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            app(["import", *arguments, "-o", "out"], prog_name="divergence")
        error = capsys.readouterr().err
        assert end.value.code == 2, error
        assert error.startswith("error: ") and len(error) < 1500, error
        _, *rest = error.strip().split("\n")
        assert all(line.startswith("  ") for line in rest), error
        assert not (tmp_path / "out").exists() and not (tmp_path / "pwned").exists()
        return error

    return run


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch deprecates
@pytest.mark.parametrize("name", TENSORS)
def test_files_of_tensors(name, tmp_path, refused, monkeypatch):
    """A file of tensors is refused by its name, alone and in a folder."""
    monkeypatch.setattr("divergence.run.foreign._MAX_STEPS", 100_000)
    make, words = TENSORS[name]
    (tmp_path / "dump").mkdir()
    make(tmp_path / "dump" / name)
    error = " ".join(refused("dump", "--map", "map.toml", "--format", "files").split())
    assert words in error
    if name != "many files.pt":
        assert name in error
        assert words in " ".join(refused(f"dump/{name}", "--map", "map.toml").split())


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_each_form(name, tmp_path, refused):
    """A dump of another tool is refused, with the file that is wrong and what is wrong with it."""
    make, place, words = FOLDERS[name]
    (tmp_path / "dump").mkdir()
    make(tmp_path / "dump")
    error = refused("dump")
    assert words in " ".join(error.split()), error
    assert place in error.partition("where: ")[2], error


def test_what_is_no_file(tmp_path, refused):
    """A pipe, a device and a name that no system has are not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        ("pipe", "pipe"),
        ("/dev/zero", "device"),
        ("x" * 400, "no such file"),
        ("a\0b", "no such file"),
        ("/dev/stdin", "stdin"),
    ):
        assert words in refused(path)


def test_what_looks_odd_is_read(tmp_path, monkeypatch):
    """A dump may hold hard links, names that differ in case or normal form alone, and large
    numbers in them: these are its own files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "map.toml").write_text(MAP)
    folder = tmp_path / "dump"
    folder.mkdir()
    names = ["a", "A", "\u00e9", "e\u0301", "\u202e", "9" * 200]
    for name in names:
        numpy.save(folder / f"{name}.npy", numpy.ones(2, "f4"))
    os.link(folder / "a.npy", folder / "hard.npy")
    archive(
        folder / "t.pt",
        {
            "t": tensor(2, 2, stride=(0, 1), offset=2),
            "size": torch.Size([3]),
            "set": {1},
            "bytes": b"x",
            "kind": torch.float32,
            "none": None,
            "parameter": Call(
                torch._utils._rebuild_parameter, tensor(3), True, collections.OrderedDict()
            ),
        },
    )
    with pytest.raises(SystemExit) as end:
        app(["import", "dump", "--map", "map.toml", "-o", "out"], prog_name="divergence")
    assert end.value.code == 0
    run = Run.open("out")
    sites = {record.site.removesuffix(":out"): record.shape for record in run.records}
    assert sites == {**dict.fromkeys([*names, "hard"], (2,)), "t": (2, 2), "parameter": (3,)}


def test_more_files_than_may_be_open(tmp_path):
    """A dump may have more files of tensors than a process may open: none stays open."""
    for number in range(100):
        torch.save(torch.ones(2), tmp_path / f"a{number}.pt")
        numpy.save(tmp_path / f"b{number}.npy", numpy.ones(2))
        save_file({f"c{number}": torch.ones(2)}, tmp_path / f"c{number}.safetensors")
    folder = DumpFolder(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    values = [folder.value(name) for name in folder.names]
    assert len(values) == 300 and len(os.listdir("/proc/self/fd")) == before


def test_every_dtype_and_view(tmp_path):
    """What torch.save writes of plain tensors is read as torch.load reads it, bit for bit."""
    numbers = torch.arange(48, dtype=torch.uint8)
    plain = {
        name: numbers.clone().view(getattr(torch, name))
        for name in """
            int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64
            complex64 complex128 float8_e4m3fn float8_e5m2
        """.split()
    }
    views = {
        "t": numbers.view(6, 8).t(),
        "part": numbers[5:9],
        "step": numbers[::3],
        "scalar": numbers[3],
        "empty": numbers[:0],
        "bool": numbers > 3,
        "grad": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save({**plain, **views}, tmp_path / "a.pt")
    value = DumpFolder(tmp_path).value("a.pt")
    expected = torch.load(tmp_path / "a.pt", weights_only=True)
    assert value.keys() == expected.keys()
    for name, item in expected.items():
        assert value[name].dtype == item.dtype and value[name].shape == item.shape, name
        flat, other = item.detach().contiguous(), value[name].contiguous()
        assert bytes(flat.reshape(-1).view(torch.uint8).tolist()) == bytes(
            other.reshape(-1).view(torch.uint8).tolist()
        ), name
