"""What other programs write, small and valid, for benchmarks/fuzz.py to damage: dumps of tensors,
log-probabilities, results of evaluations, losses, prompts and labels.

A form is a file or folder and the commands that read it. Hostile ones are those that the tests
know (tests/domains/importing/test_hostile.py), and some for the readers that no import has.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks._fuzz_damage import (
    NUMBERS,
    OTHERS,
    TEXTS,
    as_json,
    damage_header,
    damage_records,
    damaged_bytes,
    damaged_value,
)

SCORES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "scores"
MAP = (
    '[[file]]\npattern = "{name}.npy"\nsite = "layers.{name}:out"\n'
    '[[key]]\npattern = "{name}"\nsite = "layers.{name}:out"\n'
)
_DIRECTORY = b"PK\1\2"


# -- valid forms ---------------------------------------------------------------------------------


def build_forms(
    folder: Path, *, kinds: Collection[str] = ("import", "scores", "losses", "prompts", "labels")
) -> dict[str, Path]:
    """A file or folder of each form, by a name that begins with the kind of what reads it."""
    forms: dict[str, Path] = {}
    for name, write in _WRITERS.items():
        if name.partition(" ")[0] in kinds:
            forms[name] = folder / name.replace(" ", "-")
            forms[name].mkdir(parents=True)
            write(forms[name])
    for path in sorted(SCORES.iterdir()) if "scores" in kinds else ():
        if path.is_dir():
            name = "a.eval" if path.name == "inspect" else "a"
            forms[f"scores {path.name}"] = path / name
    return forms


def _tensors() -> dict[str, Any]:
    import torch

    return {
        "0": torch.arange(6.0).view(1, 3, 2),
        "1": torch.ones(3, 2, dtype=torch.bfloat16),
        "model": torch.arange(3)[None],
    }


def _files(folder: Path) -> None:
    import numpy
    import torch
    from safetensors.torch import save_file

    tensors = _tensors()
    for name in ("0", "model"):
        numpy.save(folder / f"{name}.npy", tensors[name].numpy())
    torch.save(
        {"2": tensors["0"], "more": {"3": tensors["1"].t(), "text": "x", "n": [1, None]}},
        folder / "a.pt",
    )
    save_file({"4": tensors["0"], "5": tensors["1"]}, folder / "b.safetensors")


def _msprobe(folder: Path) -> None:
    import torch

    for step in (0, 1):
        place = folder / f"step{step}" / "rank0"
        (place / "dump_tensor_data").mkdir(parents=True)
        data: dict[str, Any] = {}
        for name, tensor in _tensors().items():
            full = f"Module.{'model' if name == 'model' else f'model.layers.{name}'}.M.forward.0"
            for port in ("input", "output"):
                torch.save(tensor, place / "dump_tensor_data" / f"{full}.{port}.0.pt")
            data[full] = {
                "input_args": [{"type": "torch.Tensor", "data_name": f"{full}.input.0.pt"}],
                "input_kwargs": {"x": {"data_name": None} if step > 5 else {"value": 1}},
                "output": [{"data_name": f"{full}.output.0.pt", "Norm": float("nan")}],
                "parameters": {"weight": {}},
            }
        value = {"task": "tensor", "level": "L0", "data": data}
        (place / "dump.json").write_text(json.dumps(value))


def _sglang(folder: Path) -> None:
    import torch

    place = folder / "TP0_PP0_Rank0_pid1"
    place.mkdir()
    tensors = _tensors()
    for number in (0, 1):
        torch.save(
            {
                "model.layers.0.input_layernorm": [tensors["1"], tensors["1"]],
                "model.layers.1.mlp": tensors["0"][0],
                "model.norm": [tensors["1"], tensors["1"]],
                "model": tensors["1"],
                "logits_processor": tensors["0"][0][-1:],
                "model.forward_batch_info.input_ids": tensors["model"][0, : 3 - 2 * number],
                "model.forward_batch_info.seq_lens": torch.tensor([3 + number]),
            },
            place / f"Pass{number:05d}.pt",
        )


def _dumper(folder: Path) -> None:
    import torch

    tensors = _tensors()
    names = {
        "input_ids": tensors["model"][0],
        "non_intrusive__model.layers.0.output": tensors["1"],
        "non_intrusive__model.layers.1.inputs.0": tensors["0"],
        "rids": ["x"],
    }
    for index, (name, value) in enumerate(names.items()):
        torch.save(
            {"value": value, "meta": {"world_size": 1, "step": 0, "name": name}},
            folder / f"step=0___rank=0___dump_index={index}___name={name}.pt",
        )


def _debugger(folder: Path) -> None:
    from safetensors.torch import save_file

    def leaf(name: str) -> dict[str, Any]:
        file = f"M_{name}.safetensors"
        save_file({"data": _tensors()["0"]}, folder / file)
        return {"shape": "x", "dtype": "x", "value": f"./{file}"}

    tree = {
        "module_path": "M (top-level)",
        "inputs": {"args": [leaf("inputs_args_0")], "kwargs": {}},
        "outputs": leaf("outputs_logits"),
        "children": [
            {
                "module_path": f"M.layers.{n}",
                "inputs": {"args": [], "kwargs": {"x": leaf(f"layers.{n}_inputs_kwargs_x")}},
                "outputs": [leaf(f"layers.{n}_outputs_0")],
                "children": [],
            }
            for n in (0, 2)
        ],
    }
    leaf("layers.1_inputs_kwargs_x")  # of a block that the tree leaves out
    (folder / "M_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))


def _rollouts(folder: Path) -> None:
    lines = [
        {
            "tokens": [5, 6, 7, 11, 12],
            "response_length": 2,
            "loss_mask": [1, 1],
            "rollout_log_probs": [-0.5, -1.0 - number],
            "log_probs": [-0.25, None],
        }
        for number in range(4)
    ]
    _lines(folder / "r.jsonl", lines)


def _top(folder: Path) -> None:
    lines = [
        {
            "prompt_ids": [5],
            "completion_ids": [11, 12],
            "logprobs": [-0.5, -1.0],
            "completion_mask": [1, 1],
            "top_logprobs": [{"11": -0.5, "3": -1.0}, [[12, -1.0]]],
        }
        for _ in range(3)
    ]
    _lines(folder / "r.jsonl", lines)


def _lm_eval(folder: Path) -> None:
    lines = [
        {
            "doc_id": number,
            "arguments": {"gen_args_0": {"arg_0": "2 + 2 =", "arg_1": " 4"}},
            "resps": [[["-0.5", "True"]]],
        }
        for number in range(4)
    ]
    _lines(folder / "s.jsonl", lines)


def _kld(folder: Path) -> None:
    random_ = random.Random(0)
    rows = struct.pack("<ff", 16 / 65535, -17.0) + random_.randbytes(2 * 30)
    tokens = struct.pack("<32i", *(random_.randrange(30) for _ in range(32)))
    (folder / "base.kld").write_bytes(
        b"_logits_" + struct.pack("<Iii", 16, 30, 2) + tokens + rows * 14
    )


def _losses(folder: Path) -> None:
    rows = [{"step": n, "loss": 3 - n / 99, "grad_norm": 1.0, "eval_loss": 2} for n in range(40)]
    _lines(folder / "l.jsonl", rows)
    text = "step,loss,grad_norm\n" + "".join(f"{r['step']},{r['loss']},1\n" for r in rows)
    (folder / "l.csv").write_text(text)
    state = {"global_step": 40, "log_history": rows}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def _prompts(folder: Path) -> None:
    rows = [
        {"text": "one two"},
        {"input_ids": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "hello"}]},
    ]
    _lines(folder / "p.jsonl", rows[:2])
    (folder / "p.json").write_text(json.dumps(rows[:2]))
    (folder / "p.txt").write_text("one two\n\nthree\n")


def _labels(folder: Path) -> None:
    _lines(folder / "l.jsonl", [{"completion_from": 1}, [-100, 2, 3]])


def _lines(path: Path, values: list[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


_WRITERS: dict[str, Callable[[Path], None]] = {
    "import files": _files,
    "import msprobe": _msprobe,
    "import sglang": _sglang,
    "import dumper": _dumper,
    "import debugger": _debugger,
    "import rollouts": _rollouts,
    "import top": _top,
    "import lm-eval": _lm_eval,
    "import kld": _kld,
    "losses": _losses,
    "prompts": _prompts,
    "labels": _labels,
}


# -- damage --------------------------------------------------------------------------------------


def damage_form(place: Path, random_: random.Random) -> None:
    """One to three kinds of damage to a file or to files of a folder."""
    for _ in range(random_.choice([1, 1, 2, 3])):
        files = sorted(path for path in place.rglob("*") if path.is_file()) or [place]
        path = random_.choice(files)
        kinds = [_bytes, *_KINDS.get(path.suffix, [_text]) * 4]
        if place.is_dir():
            kinds.append(_name)
        with contextlib.suppress(Exception):
            random_.choice(kinds)(path, random_)  # what is none of its form any more stays


def _bytes(path: Path, random_: random.Random) -> None:
    path.write_bytes(damaged_bytes(path.read_bytes(), random_))


def _name(path: Path, random_: random.Random) -> None:
    """Another name: another number in it, another text, or none."""
    number = str(random_.choice([0, 1, 7, 10**8, 10**60]))
    name = random_.choice(
        [
            re.sub(r"\d+", number, path.name, count=random_.choice([0, 1])),
            path.name.upper(),
            path.stem + random_.choice(["\x1b[2J", " ", ".", "=", "___rank=x"]) + path.suffix,
            f"x{path.suffix}",
            "",
        ]
    )
    path.rename(path.with_name(name)) if name else path.unlink()


def _json(path: Path, random_: random.Random) -> None:
    value = json.loads(path.read_bytes())
    for _ in range(random_.choice([1, 1, 3, 20])):
        damaged_value(value, random_)
    path.write_bytes(as_json(value))


def _text(path: Path, random_: random.Random) -> None:
    """A word, number or line of CSV, TOML or YAML becomes another."""
    text = path.read_text("utf-8", "replace")
    words = list(re.finditer(r"[\w.+-]+|[^\w\s]", text))
    for word in sorted(
        random_.sample(words, min(len(words), random_.choice([1, 1, 3]))),
        key=lambda match: -match.start(),
    ):
        fresh = str(
            random_.choice(
                [*NUMBERS[:-1], *TEXTS, *OTHERS, "&a [*a]", "!!python/name:x", '"', "," * 99, "\n"]
            )
        )
        text = text[: word.start()] + fresh + text[word.end() :]
    path.write_text(text, "utf-8", "replace")


def _npy(path: Path, random_: random.Random) -> None:
    data = path.read_bytes()
    end = data.index(b"\n")
    header = data[10:end].decode("latin1")
    word = random_.choice(list(re.finditer(r"\w+|[^\w\s]", header)))
    fresh = random_.choice(
        [
            "",
            "-1",
            "0",
            str(2**62),
            "9" * 5000,
            "(",
            "[" * 2000,
            "-" * 2000,
            "<U4",
            "O",
            "True",
            "4,",
            "f8",
            ">",
        ]
    )
    text = (header[: word.start()] + fresh + header[word.end() :] + "\n").encode("latin1")
    path.write_bytes(data[:8] + struct.pack("<H", len(text) & 0xFFFF) + text + data[end + 1 :])


def _zip(path: Path, random_: random.Random) -> None:
    """A member changes as a file of its own would, a field of the directory does, or a member is
    there twice, is packed, or is gone."""
    if random_.random() < 0.3:
        data = bytearray(path.read_bytes())
        entries = [match.start() for match in re.finditer(re.escape(_DIRECTORY), data)]
        place = random_.choice(entries) + random_.choice([8, 10, 16, 20, 24, 28, 30, 38, 42])
        data[place : place + 4] = random_.choice(
            [bytes(4), b"\1\0\0\0", b"\xff" * 4, b"\xff\xff\xff\x7f", random_.randbytes(4)]
        )
        path.write_bytes(data)
        return
    with zipfile.ZipFile(path) as file:
        members = [(item, file.read(item)) for item in file.infolist()]
    number = random_.randrange(len(members))
    item, data = members[number]
    kind = random_.random()
    if kind < 0.1:
        members.append(random_.choice(members))
    elif kind < 0.2:
        members.pop(number)
    elif kind < 0.3:
        item.compress_type = zipfile.ZIP_DEFLATED
    else:
        inner = path.with_name("member" + Path(item.filename).suffix)
        inner.write_bytes(bytes(data))
        _KINDS.get(inner.suffix, [_bytes])[0](inner, random_)
        members[number] = item, inner.read_bytes()
        inner.unlink()
    with zipfile.ZipFile(path, "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that is there twice
        for item, data in members:
            file.writestr(item, data)


def _pickle(path: Path, random_: random.Random) -> None:
    """An integer, a name or an opcode of a pickle becomes another."""
    data = path.read_bytes()
    fresh: bytes
    numbers = list(re.finditer(rb"K(.)|M(..)|J(....)", data, re.DOTALL))
    if random_.random() < 0.6 and numbers:
        match = random_.choice(numbers)
        value = random_.choice([0, 1, 2, 63, -1, 2**31 - 1, 2**62, -(2**63)])
        fresh = b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        data = data[: match.start()] + fresh + data[match.end() :]
    else:
        place = random_.randrange(len(data))
        fresh = random_.choice(
            [
                b"h\0",
                b"h\1",
                b"]",
                b"}",
                b"(",
                b"t",
                b"R",
                b"0",
                b"2",
                b"N",
                b"a",
                b"s",
                b"cos\nsystem\n",
                b"ctorch\nSize\n",
                b")R",
                b"\x85",
                b"(h\0h\0h\0t" * 999,
            ]
        )
        data = data[:place] + fresh + data[place + random_.choice([0, 1]) :]
    path.write_bytes(data)


_KINDS: dict[str, list[Callable[[Path, random.Random], None]]] = {
    ".json": [_json],
    ".jsonl": [damage_records],
    ".npy": [_npy],
    ".pt": [_zip],
    ".eval": [_zip],
    ".safetensors": [damage_header],
    ".kld": [_bytes],
    ".pkl": [_pickle],
}


# -- hostile ones --------------------------------------------------------------------------------


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("header.json", "samples/1_epoch_1.json"):
            file.writestr(name, b'{"eval": "' + b" " * (300 << 20) + b'"}')


def _holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 << 30)


def _yaml(place: Path) -> None:
    names = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]" for n in range(12)]
    next(place.rglob("task_config.yaml")).write_text("\n".join(names))


_HOSTILE: dict[str, list[Callable[[Path], None]]] = {
    "losses": [
        lambda p: (p / "l.csv").write_text("step,loss\n" + "9" * (64 << 20)) and None,
        lambda p: (p / "l.jsonl").write_text("[" * (8 << 20)) and None,
        lambda p: (p / "trainer_state.json").write_text("[" + "[]," * (20 << 20)) and None,
        lambda p: (p / "l.csv").write_bytes(b"step,loss\n1,\0\n") and None,
        lambda p: _pipe(p / "l.csv"),
        lambda p: _holes(p / "l.jsonl"),
    ],
    "prompts": [
        lambda p: (p / "p.json").write_text("[" * (8 << 20)) and None,
        lambda p: (p / "p.jsonl").write_text("[" + "[]," * (20 << 20)) and None,
        lambda p: (p / "p.txt").write_text("x " * 20_000) and None,
        lambda p: _pipe(p / "p.txt"),
        lambda p: _holes(p / "p.json"),
    ],
    "labels": [
        lambda p: (p / "l.jsonl").write_text("[" * (8 << 20)) and None,
        lambda p: _pipe(p / "l.jsonl"),
        lambda p: _holes(p / "l.jsonl"),
    ],
    "scores inspect": [_bomb, _holes, lambda p: _pipe(p)],
    "scores evalscope": [_yaml],
    "scores lm_eval": [
        lambda p: next(p.rglob("samples*")).write_text("[" * (8 << 20)) and None,
        lambda p: next(p.rglob("samples*")).write_text("[" + "[]," * (20 << 20)) and None,
        lambda p: _pipe(next(p.rglob("results*"))),
        lambda p: _holes(next(p.rglob("samples*"))),
    ],
}


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def hostile_form(
    forms: dict[str, Path], place: Path, random_: random.Random
) -> str:  # the kind of command
    """Puts a handmade hostile form at ``place``."""
    from tests.domains.importing.test_hostile import FOLDERS, TENSORS

    choices: list[tuple[str, Callable[[Path], Any]]] = [
        *((name, make) for name in _HOSTILE if name in forms for make in _HOSTILE[name]),
        *(("import", make) for make, *_ in FOLDERS.values()),
        *(("import", lambda p, name=name: TENSORS[name][0](p / name)) for name in TENSORS),
    ]
    name, make = random_.choice(choices)
    if name == "import":
        place.mkdir()
    elif forms[name].is_dir():
        shutil.copytree(forms[name], place)
    else:
        shutil.copy(forms[name], place)
    make(place)
    return name


# -- commands ------------------------------------------------------------------------------------


def form_arguments(
    number: int, forms: dict[str, Path], folder: Path, model: Path | None
) -> list[str]:
    """A damaged or hostile form in ``folder``, and one command that reads it."""
    random_ = random.Random(number)
    if model is None:
        forms = {name: path for name, path in forms.items() if name not in ("prompts", "labels")}
    name = random_.choice(list(forms))
    bad = folder / "bad.eval" if name == "scores inspect" else folder / "bad"
    if random_.random() < 0.15:
        name = hostile_form(forms, folder / "bad", random_)
        if name == "scores inspect":
            (folder / "bad").rename(bad := folder / "bad.eval")
    else:
        (shutil.copytree if forms[name].is_dir() else shutil.copy)(forms[name], bad)
        damage_form(bad, random_)
    (folder / "map.toml").write_text(MAP)
    kind = name.partition(" ")[0]
    target = str(random_.choice(sorted(bad.rglob("*")) or [bad]) if bad.is_dir() else bad)
    if kind == "import":
        how = [] if random_.random() < 0.2 else ["--map", str(folder / "map.toml")]
        what = random_.choice([str(bad), str(bad), str(bad), target])
        if name != "import" and not name.endswith("files"):
            how = random_.choice([[], [], ["--format", "trainer"], ["--json"], how])
        return ["import", what, "-o", str(folder / "out" / "r"), *how]
    if kind == "scores":
        pair = random_.choice([[str(forms[name]), str(bad)], [str(bad), str(forms[name])]])
        return ["scores", *pair, *random_.choice([[], [], ["--force"], ["--json"]])]
    if kind == "losses":
        if target == str(bad):
            target = str(bad / "l.csv")
        sound = str(forms[name] / random_.choice(["l.csv", "l.jsonl", "trainer_state.json"]))
        return ["compare", *random_.choice([[sound, target], [target, sound]])]
    capture = ["capture", str(model), "--dry-run", "--max-new-tokens", "1"]
    if kind == "labels":
        return [*capture, "--train", "--labels", target, "--prompt", "a b", "--prompt", "c d"]
    return [*capture, "--prompts", target]
