"""Every causal architecture of transformers, made small: healthy on other kernels, and planted.

    python benchmarks/architectures.py [--only llama,mamba] [--dtypes float32] [--out FILE.jsonl]
    python benchmarks/architectures.py --out FILE.jsonl --tables

A config's sizes are set by their names (hidden size, depth, heads, experts small); what cannot be
built so is counted and left out. A runs the CPU's own kernels, healthy B the oldest ones (both in
processes of their own, benchmarks/_machines.py); the other B has noise of a third planted in the
output of one Linear of the middle block. Counted are alarms of healthy pairs, without and with a
truth, and the blocks and sides that are named of planted ones. What cannot be captured has to get
an error that says what to do: any other one is listed.

Each architecture and dtype is a line of ``--out``, and is not done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks._machines import Machine
from benchmarks._trials import upper
from divergence import compare
from divergence.errors import DivergenceError, FaultError
from divergence.recording.structure import describe_modules

QUIET = ("identical", "within_floor")
LENGTHS = (12, 7)
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embedding_size",
            "word_embed_proj_dim",
            "lm_head_dim",
            "input_embedding_size",
            "rnn_width",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "n_layers",
            "decoder_layers",
            "encoder_layers",
            "num_decoder_layers",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "attention_head_dim"), 16),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "d_ff",
            "decoder_ffn_dim",
            "dff",
            "encoder_ffn_dim",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
            "ffn_hidden_size",
            "mlp_intermediate_size",
        ),
        128,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "n_shared_experts",
            "first_k_dense_replace",
            "num_shared_experts",
            "moe_num_shared_experts",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "v_head_dim",
            "state_size",
            "mamba_d_state",
            "ssm_state_size",
            "index_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "mamba_head_dim",
            "mamba_d_head",
        ),
        16,
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "sliding_window"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    "qk_rope_head_dim": 8,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "initializer_range": 0.08,
    "attn_layer_indices": [1, 3],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_kv_shared_layers": 0,
    "attention_types": [[["global", "local"], 2]],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""What each name of a size becomes."""
OTHER_SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_experts_per_tok": 1},
    {"layer_types": ["mamba", "attention"] * 2},
    {"layer_types": ["linear_attention", "full_attention"] * 2},
)
"""What is tried where a config refuses those."""


def smaller(model_type: str, other: Mapping[str, Any]) -> Any:
    """Its config with small sizes, and ``other`` ones. Raises whatever the config's code does."""
    kind = transformers.AutoConfig.for_model(model_type).__class__
    names = kind().to_dict()
    values = {name: size for name, size in SIZES.items() if name in names} | other
    if "qk_rope_head_dim" in names:  # of latent attention; its heads are not grouped
        values |= {"num_key_value_heads": 4, "head_dim": 8}
    if {"expand", "num_heads", "head_dim"} <= names.keys():  # of Mamba 2: of 2 x 64 channels
        values["num_heads"] = 8
    if (
        isinstance(names.get("rope_parameters"), dict)
        and "mrope_section" in names["rope_parameters"]
    ):
        values["rope_parameters"] = {**names["rope_parameters"], "mrope_section": [2, 3, 3]}
    for name, value in names.items():
        if name.endswith("text_config") and isinstance(value, dict):
            values[name] = {
                **{k: s for k, s in SIZES.items() if k in value},
                "model_type": value.get("model_type", ""),
            }
    return kind(**values, is_decoder=True) if "is_decoder" in names else kind(**values)


def built(model_type: str, folder: Path) -> nn.Module:
    """The model, saved. Raises ValueError where it is not small, and what its code raises."""
    errors: list[Exception] = []
    for other in OTHER_SIZES:
        try:
            return _built(smaller(model_type, other), folder)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _built(config: Any, folder: Path) -> nn.Module:
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter, value in model.named_parameters():
        if parameter.endswith("bias"):
            value.data.normal_(0, 0.05)
    with torch.no_grad():
        out = model(input_ids=torch.arange(3, 11)[None])
    if not bool(out.logits.isfinite().all()):
        raise ValueError("its logits are not finite")
    model.save_pretrained(folder)
    return model


def planted_at(model: nn.Module) -> tuple[str, str] | None:
    """(the middle block, the last Linear in it that every token goes through and that shows).
    Noise is a share of what comes out: a router whose weights are zeros has none."""
    notes = describe_modules(model)
    blocks = [path for path, note in notes.items() if note.role == "block"]
    if not blocks:
        return None
    block = blocks[len(blocks) // 2]
    linears = {
        f"{block}.{path}".rstrip("."): part
        for path, part in model.get_submodule(block).named_modules()
        if (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
        and "expert" not in path
        and bool(part.weight.any())
    }
    ids = torch.arange(3, 3 + LENGTHS[1])[None]
    for path, part in reversed(linears.items()):
        with torch.no_grad():
            healthy = model(input_ids=ids).logits
            handle = part.register_forward_hook(_raised)
            is_shown = not torch.equal(healthy, model(input_ids=ids).logits)
            handle.remove()
        if is_shown:
            return block, path
    return None


def _raised(module: nn.Module, args: Any, out: Any) -> Any:
    """None, which changes nothing, of a router that gives several tensors."""
    return out + torch.rand_like(out) if isinstance(out, torch.Tensor) else None


def tried(model_type: str, dtype: str, folder: Path, machines: tuple[Machine, Machine]) -> dict:
    """One line of results."""
    line: dict[str, Any] = {"model": model_type, "dtype": dtype, "state": "not built"}
    try:
        model = built(model_type, folder / "model")
    except Exception as error:
        return line | {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    native, old = machines
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for length in LENGTHS]
    where = planted_at(model)
    deep = dtype != "float32"
    try:
        native.run(
            "capture",
            model=folder / "model",
            out=folder / "a",
            prompts=prompts,
            dtype=dtype,
            max_new_tokens=3,
            probe=False,
        )
    except RuntimeError as error:
        return line | {"state": "not captured", "error": str(error).partition(": ")[2]}
    line["state"] = "captured"
    try:
        native.run("truth", run=folder / "a", out=folder / "truth")
        line["truth"] = True
    except RuntimeError as error:
        line |= {"truth": False, "error": f"truth: {str(error).partition(': ')[2]}"}
    right = folder / "truth" if line["truth"] else None
    try:
        old.run("capture", like=folder / "a", out=folder / "b", probe=False, escalate=deep)
        line["healthy"] = _said(folder / "a", folder / "b", right)
        if where is not None:
            line["block"], line["linear"] = where
            native.run(
                "capture",
                like=folder / "a",
                out=folder / "planted",
                probe=False,
                escalate=deep,
                plants=[f"{where[1]}:out=noise:0.3"],
            )
            line["planted"] = _said(folder / "a", folder / "planted", right)
    except (RuntimeError, DivergenceError) as error:
        line["error"] = str(error)
    except Exception as error:  # of compare, which runs here
        line["error"] = f"{type(error).__name__}: {error}"
    return line


def _said(a: Path, b: Path, right: Path | None) -> list[dict[str, Any]]:
    """The verdict without a truth, and with it."""
    lines = []
    for truth in (None, right) if right is not None else (None,):
        verdict = compare(a, b, truth=truth).verdict
        onset = verdict.onset
        lines.append(
            {
                "kind": verdict.kind,
                "side": verdict.side,
                "confidence": verdict.confidence,
                "site": None if onset is None else onset.site,
                "block": None if onset is None else onset.block,
                "summary": verdict.summary,
            }
        )
    return lines


def is_honest(error: str) -> bool:
    """Does it come as one of divergence's errors, which say what to try, and blame no file?"""
    import divergence.errors

    kind = getattr(divergence.errors, error.removeprefix("truth: ").partition(":")[0], None)
    is_own = isinstance(kind, type) and issubclass(kind, DivergenceError)
    return is_own and not issubclass(kind, FaultError) and "damaged" not in error


def table(lines: list[dict[str, Any]], dtypes: list[str]) -> str:
    """Counts by dtype, and what is not as it should be, one a line."""
    columns = [[line for line in lines if line["dtype"] == dtype] for dtype in dtypes]
    rows: list[str] = ["| | " + " | ".join(dtypes) + " |", "|---|" + "---|" * len(dtypes)]

    def row(title: str, cells: list[str]) -> None:
        rows.append(f"| {title} | {' | '.join(cells)} |")

    def pairs(column: list[dict], key: str, number: int) -> list[tuple[dict, dict]]:
        return [(x, x[key][number]) for x in column if len(x.get(key, ())) > number]

    ran = [[x for x in column if x["state"] != "not built"] for column in columns]
    row("architectures tried", [str(len(column)) for column in columns])
    row("built small", [str(len(column)) for column in ran])
    row("captured", [str(sum(x["state"] == "captured" for x in column)) for column in ran])
    row("with a truth", [str(sum(bool(x.get("truth")) for x in column)) for column in ran])
    notes: list[str] = []
    for number, title in enumerate(("two runs alone", "with a truth")):
        cells, named, sided, other = [], [], [], []
        for column in columns:
            healthy = pairs(column, "healthy", number)
            alarms = [(x, said) for x, said in healthy if said["kind"] not in QUIET]
            cells.append(
                f"{len(alarms)} of {len(healthy)}"
                + (f" (rate < {100 * upper(len(alarms), len(healthy)):.1f}%)" if healthy else "")
            )
            notes += [
                f"{x['model']}, {x['dtype']}, healthy, {title}: {s['kind']} at {s['site']} "
                f"({s['confidence']}): {s['summary']}"
                for x, s in alarms
            ]
            planted = pairs(column, "planted", number)
            exact = [
                (x, s) for x, s in planted if s["block"] == x["block"] and s["kind"] == "localized"
            ]
            named.append(f"{len(exact)} of {len(planted)}")
            sided.append(f"{sum(s['side'] == 'candidate' for _, s in exact)} of {len(exact)}")
            wrong = [s for _, s in planted if s["side"] in ("reference", "both")]
            other.append(str(len(wrong)))
            notes += [
                f"{x['model']}, {x['dtype']}, planted in {x['linear']}, {title}: {s['kind']} "
                f"at {s['site']} ({s['side']}, {s['confidence']}): {s['summary']}"
                for x, s in planted
                if (x, s) not in exact or s["side"] in ("reference", "both")
            ]
        row(f"false alarms, {title}", cells)
        row(f"planted: the right block, {title}", named)
        if number:
            row("planted: the right side, of those", sided)
            row("planted: a wrong side is said", other)
    failed = [x for x in lines if x["state"] != "not built" and x.get("error")]
    for x in failed:
        honest = "honest" if is_honest(x["error"]) else "NOT HONEST"
        notes.append(f"{x['model']}, {x['dtype']}, {x['state']}, {honest}: {x['error'][:300]}")
    missing = {x["model"]: x["error"] for x in lines if x["state"] == "not built"}
    text = "\n".join(rows) + "\n\n" + "".join(f"- {note}\n" for note in notes)
    return text + f"\nNot built by setting sizes ({len(missing)}): {', '.join(sorted(missing))}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", help="model types, by commas")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--share", type=int, default=1, help="every so many-th architecture")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after this")
    parser.add_argument("--out", type=Path, help="results, one a line; gone on with if it exists")
    parser.add_argument("--tables", action="store_true", help="print those of --out, run nothing")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    ready = {(line["model"], line["dtype"]) for line in lines}
    dtypes, start = options.dtypes.split(","), time.perf_counter()
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[:: options.share]
    names = options.only.split(",") if options.only else names
    wanted = [(n, d) for n in names for d in dtypes if (n, d) not in ready]
    machines: tuple[Machine, Machine] | None = None
    for name, dtype in () if options.tables else wanted:
        if time.perf_counter() - start > options.seconds:
            break
        machines = machines or (Machine("native"), Machine("old"))
        with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
            line = tried(name, dtype, Path(folder), machines)
        lines.append(line)
        said = [v["kind"] for key in ("healthy", "planted") for v in line.get(key, ())]
        print(
            f"{name} {dtype}: {line['state']} {said} {line.get('error', '')[:200]}",
            file=sys.stderr,
            flush=True,
        )
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    for machine in machines or ():
        machine.close()
    print(table(lines, dtypes))


if __name__ == "__main__":
    main()
