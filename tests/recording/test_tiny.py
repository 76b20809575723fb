"""The tiny models load, speak, are lively and are the same everywhere."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from divergence.errors import RunExistsError, UsageError
from tests.models import tiny

PROMPT = (
    "The harbour was quiet in the early morning. Fishing boats came back with the tide, "
    "老师在黑板上写下一个问题 and def mean(values): return 0.0"
)
CAUSAL = [name for name in tiny.ARCHITECTURES if name not in ("bert", "t5")]


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer as a user gets them; every weight is in the file and used."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    kind = {"BertForMaskedLM": "MaskedLM", "T5ForConditionalGeneration": "Seq2SeqLM"}
    auto = getattr(transformers, f"AutoModelFor{kind.get(config['architectures'][0], 'CausalLM')}")
    options |= {"trust_remote_code": "auto_map" in config}
    model, loading = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(loading.values()), loading
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, trust_remote_code="auto_map" in config
    )
    return model.eval(), tokenizer


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_architecture_loads_and_runs(architecture, tiny_model):
    """Loads offline with nothing missing or left over, and generates the tokens asked for."""
    model, tokenizer = load(tiny_model(architecture))
    inputs = tokenizer(PROMPT, return_tensors="pt")
    if architecture == "bert":
        with torch.no_grad():
            assert torch.isfinite(model(**inputs).logits).all()
        return
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    start = 1 if architecture == "t5" else inputs["input_ids"].shape[1]
    assert output.shape[1] == start + 4


@pytest.mark.parametrize("architecture", ["bert", "llama", "qwen3", "t5"])
def test_tokenizer_round_trips_text(architecture, tiny_model):
    """Any text comes back, with or without special tokens around it, and words fall into pieces."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(architecture))
    for text in (PROMPT, "naïve 🙂 \t x\n", "<|not special|>", "  two  spaces "):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer(PROMPT)["input_ids"]) < len(PROMPT.encode())


def test_special_tokens_are_where_each_family_puts_them(tiny_model):
    """Llama begins with bos, T5 ends with eos, BERT has both, Qwen none."""
    from transformers import AutoTokenizer

    found = {}
    for architecture in ("llama", "t5", "bert", "qwen3"):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model(architecture))
        ids = tokenizer("a")["input_ids"]
        found[architecture] = (ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id)
    assert found == {
        "llama": (True, False),
        "t5": (False, True),
        "bert": (True, True),
        "qwen3": (False, False),
    }


def test_chat_template_renders_or_is_absent(tiny_model):
    """A chat template by default, none on request."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain = AutoTokenizer.from_pretrained(tiny_model("llama", chat_template=False))
    assert plain.chat_template is None


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_rebuilding_gives_the_same_bytes(architecture, tiny_model, tmp_path):
    """The same arguments give the same files; another seed gives other weights."""
    first = digests(tiny_model(architecture))
    assert digests(tiny.build(architecture, tmp_path / "again")) == first
    other = digests(tiny.build(architecture, tmp_path / "other", seed=1))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.slow
def test_another_process_on_other_kernels_gives_the_same_bytes(llama, tmp_path):
    """Neither the instruction set, nor the hash seed, nor threads reach the files."""
    code = "import sys; from tests.models.tiny import build; build('llama', sys.argv[1])"
    switches = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "5"}
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m"],
        env=os.environ | switches,
        cwd=root,
        check=True,
    )
    assert digests(tmp_path / "m") == digests(llama)


def test_weights_are_the_ones_of_every_other_machine(llama):
    """The bytes are pinned: a change here changes every number in the docs."""
    assert (
        digests(llama)["model.safetensors"]
        == "6decbb73a0b7b2622cb6620e899f344f3585f6a517eddfcf814b57191117f7de"
    )


@pytest.mark.parametrize("architecture", CAUSAL)
def test_models_are_lively(architecture, tiny_model):
    """Each block moves the stream by 0.1 to 5 times itself; margins are neither 0 nor huge."""
    model, tokenizer = load(tiny_model(architecture))
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    updates = []

    def watch(module, args, kwargs, output):
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        change = (after - before).float().norm(dim=-1) / before.float().norm(dim=-1)
        updates.append(change[0, 1:].median().item())

    for block in blocks:
        block.register_forward_hook(watch, with_kwargs=True)
    with torch.no_grad():
        logits = model(**tokenizer(PROMPT, return_tensors="pt")).logits[0, 1:].float()
    assert len(updates) == 3
    assert all(0.1 < update < 5.0 for update in updates)
    top = logits.topk(2).values
    assert 0.5 < (top[:, 0] - top[:, 1]).mean() < 2.0
    assert 2.0 < logits.std(dim=-1).mean() < 5.0


def test_attention_is_neither_uniform_nor_one_hot(llama):
    """The last token attends to about a tenth to a half of what it sees."""
    model, tokenizer = load(llama, attn_implementation="eager")
    with torch.no_grad():
        output = model(**tokenizer(PROMPT, return_tensors="pt"), output_attentions=True)
    last = torch.stack(output.attentions)[:, 0, :, -1].double()  # (L, N, T)
    spread = torch.special.entr(last).sum(-1).exp() / last.shape[-1]
    assert 0.1 < spread.mean() < 0.5


def test_sink_token_stands_out(llama):
    """The first token carries massive activations to the last block."""
    model, tokenizer = load(llama)
    norms = []
    model.model.layers[-1].register_forward_hook(
        lambda module, args, output: norms.append(
            (output[0] if isinstance(output, tuple) else output).float().norm(dim=-1).flatten()
        )
    )
    with torch.no_grad():
        model(**tokenizer(PROMPT, return_tensors="pt"))
    assert norms[0][0] > 10 * norms[0].median()
    assert norms[0][1:].max() < 3 * norms[0].median()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_what_was_asked_for(dtype, tiny_model):
    """Weights are stored in the dtype and 16-bit ones are the rounded 32-bit ones."""
    from safetensors.torch import load_file

    wanted = getattr(torch, dtype)
    weights = load_file(tiny_model("llama", dtype=dtype) / "model.safetensors")
    wide = load_file(tiny_model("llama", dtype="float32") / "model.safetensors")
    for name, value in weights.items():
        assert value.dtype == wanted
        assert torch.equal(value, wide[name].to(wanted))


def test_sizes_can_be_chosen(tiny_model):
    """num_blocks, hidden and tied replace what the size says."""
    config = json.loads(
        (tiny_model("llama", num_blocks=2, hidden=32, tied=True) / "config.json").read_text()
    )
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 32)
    model, _ = load(tiny_model("llama", num_blocks=2, hidden=32, tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_demo_size_loads_and_keeps_talking(tiny_model):
    """The demo model generates 32 tokens without stopping or repeating one token."""
    model, tokenizer = load(tiny_model("llama", size="demo"))
    inputs = tokenizer(PROMPT, return_tensors="pt")
    new = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, -32:]
    assert new.unique().numel() > 16


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "lama"},
        {"architecture": "t5", "tied": False},
        {"architecture": "remote-code", "tied": True},
    ],
    ids=str,
)
def test_impossible_models_are_refused(options, tmp_path):
    """A wrong argument is a UsageError that says what would do, and leaves no folder behind."""
    options = {"architecture": "llama"} | options
    with pytest.raises(UsageError) as caught:
        tiny.build(directory=tmp_path / "m", **options)
    assert caught.value.hint
    assert not (tmp_path / "m").exists()


def test_a_full_folder_is_left_alone(tmp_path):
    """Nothing is overwritten."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunExistsError):
        tiny.build("llama", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
