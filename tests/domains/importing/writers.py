"""What other tools dump of a forward, written from a run of the same forward.

The decoder layers of an engine with fused norms hand on (update, residual): here the residual is
half of the hidden state and the update the rest, both exact in the run's dtype.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch

from divergence import Run

PROMPT_IDS = [2, 81, 290, 265, 17]


def forwards(run: Run) -> list[dict[str, torch.Tensor]]:
    """The tensors of the free pass by site, a dict a step, of prompt 0."""
    steps: dict[int, dict[str, torch.Tensor]] = {}
    for record in run.records:
        if record.pass_ == "free" and record.sample == 0:
            steps.setdefault(record.step, {})[record.site] = run.read(record).clone()
    return [steps[number] for number in sorted(steps)]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """(1, T, H) as (T, H): an engine lays all tokens on one axis."""
    return tensor[0] if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor


def halves(hidden: torch.Tensor) -> list[torch.Tensor]:
    """Two parts whose sum is the hidden state, bit for bit."""
    return [hidden / 2, hidden / 2]


def write_npy(run: Run, folder: Path) -> Path:
    """One .npy a block and step, float32, and the token ids; the map beside."""
    folder.mkdir(parents=True)
    for step, held in enumerate(forwards(run)):
        for site, tensor in held.items():
            parts = site.removesuffix(":out").split(".")
            if site.endswith(":out") and parts[:-1] == ["model", "layers"]:
                numpy.save(folder / f"layer_{parts[-1]}_step{step}.npy", tensor.float().numpy())
        numpy.save(folder / f"ids_step{step}.npy", held["model.embed_tokens:in"].numpy())
    names = folder.parent / f"{folder.name}.toml"
    names.write_text(
        '[[file]]\npattern = "layer_{layer}_step{step}.npy"\nsite = "model.layers.{layer}:out"\n'
        '[[file]]\npattern = "ids_step{step}.npy"\nsite = "model.embed_tokens:in"\n'
    )
    return names


_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


def write_sglang(
    run: Run,
    folder: Path,
    *,
    ranks: int = 1,
    pids: tuple[int, ...] = (),
    warm_up: bool = False,
    damage: Callable[[int, dict], dict] = lambda rank, held: held,
) -> Path:
    """Pass files as tensor_dump_forward_hook writes them: leaves alone, norms with their residual,
    the model's own output and the logits one pass late. ``damage``: changes what a rank holds."""
    steps = forwards(run)
    if warm_up:
        ids = steps[0]["model.embed_tokens:in"]
        steps = [{**steps[0], "model.embed_tokens:in": ids + 1}, *steps]
    for rank in range(ranks):
        pid = pids[rank] if pids else 100 + rank
        place = folder / f"TP{rank}_PP0_Rank{rank}_pid{pid}"
        place.mkdir(parents=True)
        late: dict[str, object] = {}
        for number, held in enumerate(steps):
            ids = flat(held["model.embed_tokens:in"])
            out: dict[str, object] = dict(late)
            late = {}
            for site, tensor in held.items():
                path, _, port = site.partition(":")
                kind = path.rpartition(".")[2]
                if port != "out" or path == "." or path.startswith("model.rotary"):
                    continue
                if path == "model":
                    late[path] = flat(tensor)
                elif path == "lm_head":
                    late["logits_processor"] = flat(tensor)[-1:]
                elif kind in _NORMS and path != "model.layers.0.input_layernorm":
                    out[path] = [flat(tensor), flat(held[f"{path}:in"])]
                elif kind in (*_NORMS, "down_proj", "o_proj", "act_fn", "embed_tokens"):
                    out[path] = flat(tensor)
                elif kind == "q_proj":
                    out[path.replace("q_proj", "qkv_proj")] = flat(tensor) + rank
            first = int(flat(held["model:in.position_ids"])[0])
            out |= {
                "model.forward_batch_info.input_ids": ids,
                "model.forward_batch_info.seq_lens": torch.tensor([first + len(ids)]),
                "model.forward_batch_info.positions": torch.arange(first, first + len(ids)),
            }
            torch.save(damage(rank, out), place / f"Pass{number:05d}.pt")
    return folder


def write_sglang_dumper(run: Run, folder: Path, *, ranks: int = 1) -> Path:
    """Files as dumper.py writes them with non_intrusive_mode "all": layers get and return
    (hidden states, residual), and what it calls core fields."""
    place = folder / "dump_20260101_000000_000000"
    place.mkdir(parents=True)
    for rank in range(ranks):
        index = itertools.count(1)
        for step, held in enumerate(forwards(run)):

            def put(
                name: str,
                value: object,
                layer: str | None = None,
                *,
                step: int = step,
                rank: int = rank,
                index: Iterator[int] = index,
            ) -> None:
                tags = {
                    "step": step,
                    "rank": rank,
                    "dump_index": next(index),
                    "name": name,
                    "recompute_status": "disabled",
                }
                tags |= {"layer_id": int(layer)} if layer is not None else {}
                meta = {**tags, "world_rank": rank, "world_size": ranks}
                file = "___".join(f"{key}={item}" for key, item in tags.items()) + ".pt"
                torch.save({"value": value, "meta": meta}, place / file)

            put("input_ids", flat(held["model.embed_tokens:in"]))
            put("positions", flat(held["model:in.position_ids"]))
            put("rids", ["request"])
            for site, tensor in held.items():
                path, _, port = site.partition(":")
                kind = path.rpartition(".")[2]
                what = {"in": "inputs", "out": "output"}.get(port)
                if what is None or path == ".":
                    continue
                name = f"non_intrusive__{path}.{what}"
                if kind.isdigit() and (port == "out" or kind != "0"):
                    numbers = (
                        (0, 1) if port == "out" else (1, 3)
                    )  # positions, hidden, batch, residual
                    for number, part in zip(numbers, halves(flat(tensor)), strict=True):
                        put(f"{name}.{number}", part, kind)
                elif kind == "down_proj":
                    put(name if port == "out" else f"{name}.0", flat(tensor))
            put("my_hidden", flat(held["model.norm:out"]), "7")
    return folder


def write_msprobe(run: Run, folder: Path, *, ranks: int = 1) -> Path:
    """Folders of a distributed run: stepN/rankR. Rank r's linear outputs are its own part."""
    for step, held in enumerate(forwards(run)):
        for rank in range(ranks):
            place = folder / f"step{step}" / f"rank{rank}"
            (place / "dump_tensor_data").mkdir(parents=True)
            data: dict[str, dict] = {}
            for site, tensor in held.items():
                path, _, port = site.partition(":")
                if path == "." or "." in port:
                    continue
                name = f"Module.{path}.Kind.forward.0"
                entry = data.setdefault(name, {"input_args": [], "input_kwargs": {}, "output": []})
                sort, key = ("input", "input_args") if port == "in" else ("output", "output")
                file = f"{name}.{sort}.0.pt"
                part = tensor.chunk(ranks, -1)[rank] if path.endswith("q_proj") else tensor
                torch.save(part.clone(), place / "dump_tensor_data" / file)
                entry[key].append({"type": "torch.Tensor", "data_name": file, "Norm": float("nan")})
            described = {"task": "tensor", "level": "L0", "data": data}
            (place / "dump.json").write_text(json.dumps(described))
    return folder
