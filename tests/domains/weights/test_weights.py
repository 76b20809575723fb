"""weights: each parameter that two checkpoints do not share bit for bit is put down to what relates
the two."""

import argparse
import contextlib
import json
import os
import re
import shutil
from math import nan

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import divergence
from divergence.errors import DivergenceError, UsageError

PROJ = "model.layers.{}.self_attn.{}_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint of three blocks, its head untied."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        intermediate_size=128,
        initializer_range=0.05,
    )
    folder = tmp_path_factory.mktemp("weights") / "a"
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def changed(original, tmp_path):
    """``changed(change)``: the checkpoint with its tensors changed."""

    def copy(change):
        tensors = load_file(original / "model.safetensors")
        tensors = change(tensors) or tensors
        folder = tmp_path / "b"
        folder.mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        return folder

    return copy


def every(part, how):
    """Every parameter whose name holds ``part`` becomes ``how(it)``."""

    def change(tensors):
        return {name: how(t) if part in name else t for name, t in tensors.items()}

    return change


def of(name, how):
    def change(tensors):
        tensors[name] = how(tensors[name])

    return change


def to_pairs(weight):
    """Each head's two halves as pairs, as conversions for interleaved rotary tables do."""
    return weight.view(-1, 2, 8, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def heads_swapped(weight):
    return weight.view(4, 16, -1)[[1, 0, 2, 3]].reshape(weight.shape)


def four_bits(weight):
    groups = weight.reshape(-1, 32)
    step = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / step).round() * step).view(weight.shape)


def eight_bit_floats(weight):
    """One scale for all, as checkpoints in float8 have it."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def with_adapter(weight):
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(weight.shape[0], 4, generator=generator)
    right = torch.randn(4, weight.shape[1], generator=generator)
    return (weight + 0.01 * left @ right).bfloat16().float()


def fresh(weight):
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)) * 0.05


def rotation(weight):
    return torch.linalg.qr(fresh(weight)).Q


def half_of_zeros(weight):
    weight[len(weight) // 2 :] = 0
    return weight


def with_nan(weight):
    weight[3, 4] = float("nan")
    return weight


def fused(tensors):
    """Queries, keys and values in one matrix, gates and ups in another."""
    together = {}
    for name, tensor in tensors.items():
        for first, others, whole in (
            ("q_proj", "kv", "qkv_proj"),
            ("gate_proj", ["up"], "gate_up"),
        ):
            if first in name:
                parts = [tensors[name.replace(first, f"{other}_proj")] for other in others]
                together[name.replace(first, whole)] = torch.cat([tensor, *parts])
    left = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rest = {n: t for n, t in tensors.items() if not any(part in n for part in left)}
    return rest | together


def mixed(tensors):
    """Fused, the rows of each head's query, key and value together, as some engines have it."""
    merged = fused(tensors)
    for name in [name for name in merged if "qkv" in name]:
        order = torch.arange(len(merged[name])).view(-1, 16)[[0, 4, 6, 1, 2, 5, 7, 3]].reshape(-1)
        merged[name] = merged[name][order]
    return merged


def swapped_blocks(tensors):
    """The first block in the place of the second."""
    other = {".0.": ".1.", ".1.": ".0."}
    return {re.sub(r"\.[01]\.", lambda m: other[m[0]], name): t for name, t in tensors.items()}


def partly_turned(weight):
    """The first half of each head in pairs."""
    heads = weight.reshape(-1, 16, weight.shape[1]).clone()
    heads[:, :8] = heads[:, :8].reshape(len(heads), 2, 4, -1).transpose(1, 2).flatten(1, 2)
    return heads.reshape(weight.shape)


def with_scales(tensors):
    """Codes of float8 and a scale of each row, as checkpoints of that kind are stored."""
    for name in [name for name in tensors if "mlp" in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name + "_scale"] = scale
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)


def fused_and_turned(tensors):
    """Fused, the queries' rows in pairs."""
    return fused(every("q_proj", to_pairs)(tensors))


def gate_last(tensors):
    """Fused, in one block the gate behind what it gates."""
    merged = fused(tensors)
    name = "model.layers.1.mlp.gate_up.weight"
    merged[name] = merged[name].roll(128, 0)
    return merged


def one_row(weight):
    weight = weight.clone()
    weight[5] += 0.1
    return weight


PADS = torch.zeros(32, 64)
CHANGES = {
    "bfloat16": every("", torch.Tensor.bfloat16),
    "wider": every("", torch.Tensor.double),
    "transposed": every("down_proj", lambda t: t.T),
    "turned": every("_proj", lambda t: t.T),
    "wide norm": every("norm", torch.Tensor.double),
    "flat": of(UP, torch.flatten),
    "padded": every("embed_tokens", lambda t: torch.cat([t, PADS])),
    "flat, bfloat16": of(UP, lambda t: t.flatten().bfloat16()),
    "padded, bfloat16": every("embed_tokens", lambda t: torch.cat([t, PADS]).bfloat16()),
    "fused": fused,
    "stored wide": every("up_proj", lambda t: t.bfloat16().float()),
    "pairs": lambda tensors: every("q_proj", to_pairs)(every("k_proj", to_pairs)(tensors)),
    "pairs, 4 bits": every("q_proj", lambda t: four_bits(to_pairs(t))),
    "pairs, bfloat16": every("q_proj", lambda t: to_pairs(t).bfloat16()),
    "heads": of(PROJ.format(1, "q"), heads_swapped),
    "columns": of(PROJ.format(1, "o"), lambda t: t.flip(1)),
    "mixed": mixed,
    "fused, turned": fused_and_turned,
    "row": of(UP, one_row),
    "head centred": of("lm_head.weight", lambda t: t - t.mean(0)),
    "head tied": lambda tensors: (
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    ),
    "blocks swapped": swapped_blocks,
    "in part": every("q_proj", partly_turned),
    "scales": with_scales,
    "gate last": gate_last,
    "scaled": of(UP, lambda t: -0.5 * t),
    "scaled, 4 bits": of(UP, lambda t: four_bits(1.5 * t)),
    "one plus": every("norm", lambda t: t + 1),
    "adapter": every("v_proj", with_adapter),
    "4 bits": every("mlp", four_bits),
    "float8": every("up_proj", eight_bit_floats),
    "noise": of(UP, lambda t: t + 0.2 * fresh(t)),
    "fresh": of(UP, fresh),
    "zeros": of(UP, torch.zeros_like),
    "rotated": every("q_proj", lambda t: t @ rotation(t)),
    "by rows": every("o_proj", lambda t: rotation(t) @ t),
    "cut off": every("proj", lambda t: (t.view(torch.int32) & -(1 << 16)).view(torch.float32)),
    "ones": of("model.norm.weight", torch.ones_like),
    "half": of(UP, half_of_zeros),
    "nan": of(UP, with_nan),
    "square": of(PROJ.format(0, "o"), lambda t: t.T),
    "more rows": every("embed_tokens", lambda t: torch.cat([t, fresh(t)])),
    "cut": of(UP, lambda t: t[:, :32]),
    "shape": of(UP, lambda t: fresh(t)[:, :32]),
    "a block lost": lambda tensors: {n: t for n, t in tensors.items() if "layers.2" not in n},
    "two rows, 4 bits": of(UP, lambda t: four_bits(t[[1, 0, *range(2, 128)]])),
    "rows and columns": of(UP, lambda t: t.flip(0).flip(1)),
    "scales folded in": of(UP, lambda t: t * torch.linspace(0.5, 1.5, 64)),
    "a row, rounded": of(UP, lambda t: one_row(t).bfloat16()),
    "a shard twice": of(UP, lambda t: torch.cat([t[:64], t[:64]])),
}
# The change, the relation, how many parameters have it at least, and what is said of it (~: and).
SAME = """
    bfloat16 | rounded | 23 | rounded to bfloat16 on B
    wider | dtype | 30 | equal values, float32 / float64
    transposed | transposed | 3 | transposed, 64 x 128 / 128 x 64
    turned | transposed | 21 | transposed, 64 x 64 / 64 x 64
    wide norm | dtype | 7 | float32 / float64
    flat | reshaped | 1 | the same numbers in another shape, 128 x 64 / 8192
    padded | padded | 1 | the first 96 rows are equal, and B has 32 more, of zeros
    flat, bfloat16 | reshaped | 1 | 128 x 64 / 8192, and rounded to bfloat16 on B
    padded, bfloat16 | padded | 1 | B has 32 more, of zeros; these are rounded to bfloat16 on B
    fused | fused | 3 | q_proj + k_proj + v_proj of A are qkv_proj of B
"""
OTHER = """
    stored wide | rounded | 3 | rounded to bfloat16 on B, and stored wider
    pairs | reordered | 6 | halves became pairs of neighbours within heads of 16
    pairs, 4 bits | reordered | 3 | pairs of neighbours within heads of 16 (56 of 64 moved), and 9
    pairs, bfloat16 | reordered | 3 | heads of 16 (56 of 64 moved), and rounded to bfloat16 on B
    heads | reordered | 1 | the same rows in another order: blocks of 16 moved (32 of 64 moved)
    columns | reordered | 1 | the same columns in another order (64 of 64 moved)
    mixed | fused | 3 | q_proj + k_proj + v_proj of A are qkv_proj of B, their rows mixed
    fused, turned | reordered | 3 | halves became pairs of neighbours
    row | some | 1 | 1 of 128 rows differ (5), the others are equal
    head centred | one_vector | 1 | to all logits of a token, which no probability shows
    head tied | copy | 1 | B has model.embed_tokens.weight there as well, as if tied
    blocks swapped | moved | 18 | model.layers.1.input_layernorm.weight of A
    in part | reordered | 3 | within 8 rows of heads of 16
    scales | quantised | 9 | on a grid of float8_e4m3 a row
    gate last | fused | 1 | up_proj + gate_proj of A are gate_up of B ~ take gate_proj + up_proj
    scaled | scaled | 1 | B = -0.5 × A
    scaled, 4 bits | scaled | 1 | B = 1.5 × A, and 9
    one plus | shifted | 7 | B = A + 1
    adapter | low_rank | 3 | a difference of rank 4
    4 bits | quantised | 9 | B's on a grid of 4 bits in groups of 32
    float8 | quantised | 3 | B's on a grid of float8_e4m3 a row
    noise | near | 1 | 20% apart
    fresh | unrelated | 1 | as of another initialisation or another model
    zeros | zeros | 1 | all zeros on B
    rotated | rotated | 3 | each row turned by one
    by rows | rotated | 3 | each column turned by
    cut off | cut_off | 21 | cut off to bfloat16 on B, not rounded to the nearest
    ones | constant | 1 | 1 everywhere on B, as of
    half | some | 1 | the others are equal; these all zeros on B
    nan | nonfinite | 1 | 1 number on B not finite
    square | transposed | 1 | transposed, 64 x 64 / 64 x 64
    more rows | padded | 1 | the first 96 rows are equal, and B has 96 more
    cut | padded | 1 | the first 32 columns are equal, and A has 32 more
    shape | shapes | 1 | 128 x 64 / 128 x 32
    a block lost | alone | 9 | only on A
    two rows, 4 bits | reordered | 1 | the same rows in another order (2 of 128 moved), and 9
    rows and columns | reordered | 1 | the same numbers in another order
    scales folded in | scales | 1 | each column of B is A's times a factor ~ from 0.5 to 1.5
    a row, rounded | some | 1 | 1 of 128 rows differ (5) ~ but for rounding; these B = A + 0.1
    a shard twice | some | 1 | these are rows 0, 1, 2, 3, … of A once more
"""


def cases(table, same):
    for line in table.strip().splitlines():
        label, *case = map(str.strip, line.split("|"))
        yield pytest.param(CHANGES[label], *case, same, id=label)


@pytest.mark.parametrize(
    ("change", "name", "num", "text", "same"), [*cases(SAME, True), *cases(OTHER, False)]
)
def test_what_relates_two_checkpoints_is_told(original, changed, change, name, num, text, same):
    """By the plainest relation that holds, and whether both hold the same weights."""
    report = divergence.compare_weights(original, changed(change))
    relation = next(each for each in report.relations if each.name == name)
    mine = [each for each in report.relations if each.same == relation.same]
    assert sum(each.num_parameters for each in mine if each.name == name) >= int(num)
    assert any(all(part in each.text for part in text.split(" ~ ")) for each in mine)
    assert report.same == same
    assert not report.equal


def test_a_scalar_and_whole_numbers_are_related_too(tmp_path):
    """Temperatures of one number, and counters in another dtype."""
    whole = {"scale": torch.tensor(1.5), "count": torch.arange(4), "nan": torch.tensor([1, nan])}
    save_file(whole, tmp_path / "a.safetensors")
    other = {"scale": torch.tensor(3.0), "count": torch.arange(4.0), "nan": whole["nan"].double()}
    save_file(other, tmp_path / "b.safetensors")
    report = divergence.compare_weights(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {row.first: row.text for row in report.relations} == {
        "scale": "B = 2 × A",
        "count": "equal values, int64 / float32",
        "nan": "equal values, float32 / float64",
    }


@pytest.mark.parametrize(
    ("here", "text"),
    [(True, "pairs of neighbours within heads of 16 (56 of 64"), (False, "the same rows")],
)
def test_stopped_tells_the_relation_of_the_values_where_they_are_at_hand(
    original, changed, tmp_path, here, text
):
    """Of checkpoints that are elsewhere what sums tell; nothing of what is not what ran."""
    options = {"prompts": [[1, 2, 3]], "max_new_tokens": 1, "probe": False, "truth": "no"}
    other = changed(every("q_proj", to_pairs))
    for file in ("config.json", "generation_config.json"):
        shutil.copy(original / file, other)
    a = divergence.capture(original, out=tmp_path / "run-a", **options)
    b = divergence.capture(other, out=tmp_path / "run-b", **options)
    if not here:
        changed_since = every("q_proj", fresh)(load_file(original / "model.safetensors"))
        save_file(changed_since, other / "model.safetensors")
    verdict = divergence.compare(a, b).verdict
    (told,) = [item.text for item in verdict.evidence if "q_proj" in item.text]
    assert text in told and ("halves became" in told) == here


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(original, tmp_path):
    """It is no file of weights."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="no regular file"):
        divergence.compare_weights(original, tmp_path)


@pytest.mark.parametrize("form", ["torch", "shards", "file"])
def test_one_checkpoint_in_other_files_is_identical(original, tmp_path, form):
    """However it is divided, and by whom it was stored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    if form == "torch":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    elif form == "shards":
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    path = original / "model.safetensors" if form == "file" else tmp_path
    report = divergence.compare_weights(original, path)
    assert report.equal
    assert report.num_equal == 30


def test_a_tied_head_that_is_written_out_is_the_same(original, changed):
    """Some writers leave out what is tied, some do not."""

    def tied(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    out = changed(tied)
    tensors = load_file(out / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, out.parent / "tied.safetensors")
    report = divergence.compare_weights(out, out.parent / "tied.safetensors")
    assert report.same
    assert report.relations[0].text == (
        "written out on A, where it equals model.embed_tokens.weight; B has that alone"
    )


def test_names_without_a_prefix_belong_together(original, tmp_path):
    """A base model of the same weights: the head alone is missing."""
    transformers.AutoModel.from_pretrained(original).save_pretrained(tmp_path)
    report = divergence.compare_weights(original, tmp_path)
    assert report.num_equal == 29
    assert [(each.name, each.first) for each in report.relations] == [("alone", "lm_head.weight")]


def test_a_run_is_held_against_a_checkpoint_by_digests(original, tmp_path, changed):
    """The values are not in the run; what they are rounded to is."""
    run = divergence.capture(
        original,
        out=tmp_path / "run",
        prompts=[[1, 2, 3]],
        max_new_tokens=1,
        dtype="bfloat16",
        probe=False,
        truth="no",
    )
    report = divergence.compare_weights(original, run.path)
    assert report.same
    assert report.relations[0].text == "B = A rounded to bfloat16"
    other = divergence.compare_weights(run.path, changed(of(UP, fresh)))
    assert not other.same
    assert [each.first for each in other.others] == [UP]


@contextlib.contextmanager
def in_gguf(path):
    """``add(name, values, raw_dtype=...)``: into a file of GGUF, under its own names."""
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    yield lambda name, values, **how: writer.add_tensor(
        table.get_name(name, try_suffixes=(".weight",)), values, **how
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_names_of_gguf_are_read_as_the_model_s(original, tmp_path):
    """The rows of queries and keys lie in another order there."""
    with in_gguf(tmp_path / "b.gguf") as add:
        for name, tensor in load_file(original / "model.safetensors").items():
            turned = "q_proj" in name or "k_proj" in name
            add(name, (to_pairs(tensor) if turned else tensor).numpy())
    report = divergence.compare_weights(original, tmp_path / "b.gguf")
    assert report.num_equal == 24 and report.same
    (relation,) = report.relations
    assert relation.names == [PROJ.format("*", "k"), PROJ.format("*", "q")]
    assert "halves became pairs of neighbours within heads of 16" in relation.text
    assert relation.text.endswith("as llama.cpp's llama wants it")


def test_rows_that_llama_cpp_takes_in_another_order_are_told(original, tmp_path):
    """A file of eight bits whose queries and keys nobody turned."""
    gguf = pytest.importorskip("gguf")
    with in_gguf(tmp_path / "b.gguf") as add:
        for name, tensor in load_file(original / "model.safetensors").items():
            values, form = tensor.numpy(), None
            if "proj" in name:
                form = gguf.GGMLQuantizationType.Q8_0
                values = gguf.quants.quantize(values, form)
            elif "embed" in name:
                values = values.astype("float16")
            add(name, values, raw_dtype=form)
    report = divergence.compare_weights(original, tmp_path / "b.gguf")
    rows = {row.name: row for row in report.relations}
    assert rows["unturned"].num_parameters == 6
    assert "stored as Q8_0 on B, with the rows of halves, where llama.cpp" in rows["unturned"].text
    assert "apart, stored as Q8_0 on B" in rows["quantised"].text
    assert rows["rounded"].same and rows["rounded"].text == "rounded to float16 on B"


def test_what_a_narrower_format_does_not_hold_is_no_rounding(changed):
    """Too large, and too small, for float16."""
    for factor, text in ((1e7, "too large for it: not finite there"), (1e-7, "small for it: 0 ")):
        wide = {"x.weight": factor * torch.randn(64, 64).bfloat16()}
        folder = changed(lambda tensors, wide=wide: wide)
        short = folder.parent / "short.safetensors"
        save_file({name: t.half() for name, t in wide.items()}, short)
        report = divergence.compare_weights(folder, short)
        assert not report.same and text in report.relations[0].text
        shutil.rmtree(folder)


def megatron(tensors, rank, num_ranks=2, num_groups=2):
    """What one of the ranks of Megatron stores, in a group for each head of keys."""
    kept = {}
    for name, tensor in tensors.items():
        path, end = name.removeprefix("model.").rsplit(".", 1)
        path = f"decoder.{path}" if "layers." in path else path
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            whole = torch.cat([part.view(num_groups, -1, 64) for part in parts], 1).reshape(-1, 64)
            path = path.replace("self_attn.q_proj", "self_attention.linear_qkv")
            kept[f"{path}.{end}"] = whole.chunk(num_ranks)[rank].clone()
        elif "gate_proj" in name:
            both = [tensor, tensors[name.replace("gate", "up")]]
            path = path.replace("gate_proj", "linear_fc1")
            kept[f"{path}.{end}"] = torch.cat([part.chunk(num_ranks)[rank] for part in both])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            axis = None if "norm" in name else int("o_proj" in name or "down_proj" in name)
            for own, there in (
                ("self_attn.o_proj", "self_attention.linear_proj"),
                ("mlp.down_proj", "mlp.linear_fc2"),
                ("input_layernorm", "self_attention.linear_qkv.layer_norm_weight"),
                ("post_attention_layernorm", "mlp.linear_fc1.layer_norm_weight"),
                ("embed_tokens", "embedding.word_embeddings"),
                ("lm_head", "output_layer"),
            ):
                path = path.replace(own, there)
            path = "decoder.final_layernorm" if path == "norm" else path
            name = path if path.endswith("layer_norm_weight") else f"{path}.{end}"
            kept[name] = (tensor if axis is None else tensor.chunk(num_ranks, axis)[rank]).clone()
    return kept


def test_files_are_named_from_where_one_stands(tmp_path, invoke, monkeypatch):
    """A name without a folder is a path like any other."""
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    code, out, _ = invoke("weights", "a.safetensors", "a.safetensors", "--exit-code")
    assert code == 0 and out.startswith("IDENTICAL")


def test_ranks_of_megatron_are_the_model(original, tmp_path):
    """By the names that tell how each was cut, and the layers that it fuses."""
    tensors = load_file(original / "model.safetensors")
    for rank in range(2):
        folder = tmp_path / f"mp_rank_{rank:02d}"
        folder.mkdir()
        beside = {
            "args": argparse.Namespace(params_dtype=torch.bfloat16, iteration=10),
            "rng_state": [{"np_rng_state": np.random.get_state(), "random": 1}],
            "checkpoint_version": 3.0,
        }
        stored = {**beside, "model": megatron(tensors, rank)}
        torch.save(stored, folder / "model_optim_rng.pt")
    report = divergence.compare_weights(original, tmp_path)
    assert report.same and {row.name for row in report.relations} == {"fused"}
    texts = [row.text for row in report.relations]
    assert (
        "q_proj + k_proj + v_proj of A are linear_qkv of B, in 2 groups of 32 + 16 + 16 rows"
        in texts
    )
    assert report.matching == ["names of B are Megatron's, read as transformers' own"]


@pytest.mark.parametrize(
    ("num_groups", "told", "words"),
    [
        (1, True, "linear_qkv of B, where Megatron takes 2 groups, one for each head of keys"),
        (4, True, "in 4 groups of 16 + 8 + 8 rows, where Megatron takes 2 groups"),
        (1, False, "linear_qkv of B, as of one head of keys: of several Megatron takes a group"),
    ],
)
def test_megatron_s_groups_are_as_many_as_heads_of_keys(
    original, tmp_path, invoke, num_groups, told, words
):
    """A conversion that put queries, keys and values one after another is another model there."""
    tensors = load_file(original / "model.safetensors")
    a = original if told else tmp_path / "a.safetensors"
    if not told:
        save_file(tensors, a)
    save_file(megatron(tensors, 0, 1, num_groups), tmp_path / "b.safetensors")
    report = divergence.compare_weights(a, tmp_path / "b.safetensors")
    assert not report.same and words in report.relations[0].text
    assert report.relations[0].name == ("fused" if told else "ungrouped")
    text = invoke("weights", a, tmp_path / "b.safetensors")[1]
    assert text.startswith("OTHER WEIGHTS" if told else "NO ANSWER")  # keys may have one head


def test_stages_of_megatron_s_pipeline_are_one_model(original, tmp_path):
    """Each counts its blocks from 0; the first has the embedding, the last the head."""
    tensors = load_file(original / "model.safetensors")
    for rank in range(2):
        whole = megatron(tensors, rank)
        for stage in range(2):
            part = {}
            for name, tensor in whole.items():
                block = re.search(r"layers\.(\d+)\.", name)
                if block is None:
                    own = ("embedding" in name) == (stage == 0)
                else:
                    own = (block[1] == "0") == (stage == 0)
                    number = int(block[1]) - stage
                    name = re.sub(r"layers\.\d+\.", f"layers.{number}.", name)
                if own:
                    part[name] = tensor
            folder = tmp_path / f"mp_rank_{rank:02d}_{stage:03d}"
            folder.mkdir()
            torch.save({"model": part}, folder / "model_optim_rng.pt")
    report = divergence.compare_weights(original, tmp_path)
    assert report.same and {row.name for row in report.relations} == {"fused"}


def test_experts_of_one_tensor_are_held_against_each_by_itself(tmp_path):
    """As Mixtral's files have them, and as transformers does in memory."""
    single, whole = {}, {}
    for block in range(2):
        both, down = torch.randn(2, 48, 16), torch.randn(2, 16, 24)
        whole[f"model.layers.{block}.mlp.experts.gate_up_proj"] = both
        whole[f"model.layers.{block}.mlp.experts.down_proj"] = down
        for expert in range(2):
            place = f"model.layers.{block}.block_sparse_moe.experts.{expert}"
            single[f"{place}.w1.weight"], single[f"{place}.w3.weight"] = (
                part.clone() for part in both[expert].chunk(2)
            )
            single[f"{place}.w2.weight"] = down[expert].clone()
    save_file(single, tmp_path / "a.safetensors")
    save_file(whole, tmp_path / "b.safetensors")
    report = divergence.compare_weights(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.same and report.num_equal == 4
    assert [row.name for row in report.relations] == ["fused"]


class Runs:
    """A pickle that would run code."""

    def __reduce__(self):
        return os.system, ("true",)


def test_what_is_no_checkpoint_says_so(original, tmp_path):
    """Nothing there, nothing in it, cut short, other names, a missing shard, a pickle with code."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.safetensors").write_bytes(
        (original / "model.safetensors").read_bytes()[:1000]
    )
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "lost").mkdir()
    index = {"weight_map": {"x": "model-1.safetensors"}}
    (tmp_path / "lost" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "a.json").write_text("{}")
    torch.save({"w": Runs()}, tmp_path / "code.pt")
    (tmp_path / "part-00001-of-00002.gguf").write_bytes(b"GGUF")
    for place in ("gap/mp_rank_00", "gap/mp_rank_02", "steps/iter_1", "steps/iter_2"):
        (tmp_path / place).mkdir(parents=True)
        torch.save({"x": torch.zeros(2)}, tmp_path / place / "model_optim_rng.pt")
    (tmp_path / "mp_rank_00").mkdir()
    part = megatron(load_file(original / "model.safetensors"), 0)
    torch.save({"model": part}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    for name, message in (
        ("absent", "is no file and no directory"),
        ("empty", "holds no weights"),
        ("short.safetensors", "cannot be read"),
        ("other.safetensors", "has a partner"),
        ("lost", "lacks 1 of its 1 files: model-1.safetensors"),
        ("code.pt", "which is code"),
        ("a.json", "no file of weights by its name"),
        ("part-00001-of-00002.gguf", "lacks 1 of its 2 files: part-00002"),
        ("gap", "lacks a rank: there are mp_rank_00, mp_rank_02"),
        ("steps", "holds 2 checkpoints of Megatron"),
        ("mp_rank_00", "holds one rank of 2, and the others are missing"),
    ):
        with pytest.raises(DivergenceError, match=message):
            divergence.compare_weights(original, tmp_path / name)


def test_a_damaged_gguf_is_no_fault_of_the_tool(original, tmp_path):
    """One whose header states more tensors than there are."""
    pytest.importorskip("gguf")
    many = (2**40).to_bytes(8, "little")
    (tmp_path / "counts.gguf").write_bytes(b"GGUF\3\0\0\0" + many + many)
    with pytest.raises(DivergenceError, match="IndexError"):
        divergence.compare_weights(original, tmp_path / "counts.gguf")


def test_the_command_says_what_is_related_first(original, changed, invoke):
    """And exits with 1 where it is asked to."""
    words = "weights", original, changed(every("q_proj", to_pairs))
    code, out, err = invoke(*words, "--exit-code")
    assert code == 1, err
    assert out.startswith("OTHER WEIGHTS: 3 of 30 parameters: the same rows in another")
    code, out, _ = invoke(*words, "--json")
    assert code == 0 and json.loads(out)["relations"][0]["name"] == "reordered"


def test_other_errors_are_usage_errors(original):
    """With what to try."""
    with pytest.raises(UsageError) as caught:
        divergence.compare_weights(original, "nowhere")
    assert "hf download" in str(caught.value.hint)
