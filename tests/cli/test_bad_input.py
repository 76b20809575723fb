"""Bad input on the command line: what happened, what to try, exit code 2, and nothing half-made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import LlamaForCausalLM

from divergence import capture
from divergence.errors import ModelError
from divergence.recording.engines import sessions as api
from tests.digests import without_digests

SHORT = ("-q", "--max-new-tokens", "2")


@pytest.fixture
def refused(invoke, tmp_path, monkeypatch):
    """``refused(*args, said=...)``: exit code 2, every text of ``said`` on stderr, nothing on
    stdout, no traceback, and no new file or folder."""

    # transformers logs to the stderr of its first import, which pytest has closed since
    monkeypatch.setattr("logging.raiseExceptions", False)

    def call(*args: object, said: str | tuple[str, ...], leaves: tuple[str, ...] = ()) -> str:
        before = {path.name for path in tmp_path.iterdir()}
        code, out, err = invoke(*args)
        assert code == 2, (code, err)
        assert out == ""
        assert "Traceback" not in err
        assert "fault in divergence" not in err
        for text in (said,) if isinstance(said, str) else said:
            assert text in err, (text, err)
        assert {path.name for path in tmp_path.iterdir()} - before == set(leaves)
        return err

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """Runs by name: one, the same again with nan, and others that cannot be compared with it."""
    folder = tmp_path_factory.mktemp("runs")
    llama, other = str(tiny_model("llama")), str(tiny_model("llama", seed=1))
    options = {"max_new_tokens": 2}
    plant = ["model.layers.1:out=nan"]
    capture(llama, out=folder / "a", **options)
    capture(llama, out=folder / "tokens", prompts=["Something else entirely"], **options)
    capture(llama, out=folder / "head", sites=["lm_head:out"], **options)
    capture(llama, out=folder / "first", sites=["model.layers.0:out"], **options)
    capture(other, out=folder / "weights", **options)
    capture(like=folder / "a", out=folder / "nan", plants=plant)
    return folder


@pytest.fixture
def model_copy(llama, tmp_path):
    """``model_copy()`` → a copy of the model in ``bad``, to be damaged."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        return Path(shutil.copytree(llama, tmp_path / "bad"))

    return copy


# --- models ------------------------------------------------------------------------------------


def test_no_such_model(refused, llama):
    """A path, a hub id offline, a file, nothing, somebody's unknown home."""
    refused("capture", "./none", "-o", "x", said=("no such model", "check the path"))
    refused("capture", "org/none", "-o", "x", said=("'org/none'", "HF_HUB_OFFLINE is set"))
    refused("capture", "~nobody-here/m", "-o", "x", said="no such model")
    refused("capture", "https://example.com/m", "-o", "x", said="cannot load")
    refused("capture", llama / "config.json", "-o", "x", said="give the model's directory")
    refused("capture", "-o", "x", said="there is no MODEL")


@pytest.mark.slow
def test_a_hub_id_without_a_network(tmp_path):
    """Where the hub cannot be reached the message says so, and nothing is left."""
    blocker = "import socket, time\ntime.sleep = lambda _: None\n"  # between the hub's retries
    blocker += "def no(*_): raise OSError(101, 'Network is unreachable')\n"
    blocker += "socket.socket.connect = no; socket.getaddrinfo = no\n"
    code = blocker + "from divergence.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code, "capture", "org/none", "-o", "x"],
        cwd=tmp_path,
        env={
            **{k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"},
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot load 'org/none'" in done.stderr
    assert "reaches the hub" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


DAMAGED_CONFIGS = {
    "empty": "",
    "list": "[]",
    "null": "null",
    "no type": "{}",
    "unknown type": '{"model_type": "nope"}',
    "odd type": '{"model_type": ["llama"]}',
    "wrong value": '{"model_type": "llama", "hidden_size": "abc"}',
    "impossible": '{"model_type": "llama", "hidden_size": -4}',
}


@pytest.mark.parametrize("name", DAMAGED_CONFIGS)
def test_a_damaged_config(refused, model_copy, name):
    """Whatever the library makes of it, it is the model's fault and not divergence's."""
    model = model_copy()
    (model / "config.json").write_text(DAMAGED_CONFIGS[name])
    refused("capture", model, "-o", "x", said=("cannot load", "damaged, or for another version"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "emu3_text_model", "mllama_text_model"])
def test_a_config_that_no_auto_class_takes(refused, model_copy, kind):
    """Its files are whole: the error says so, and names the ways that are left."""
    model = model_copy()
    (model / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    said = ("cannot load", "no auto class", "another --task", "inputs=")
    refused("capture", model, "--task", "causal-lm", "-o", "x", said=said)


def test_a_model_without_its_files(refused, model_copy):
    """No config, no weights, a shard of the weights missing."""
    model = model_copy()
    (model / "config.json").unlink()
    refused("capture", model, "-o", "x", said=("has no config.json", "save_pretrained"))
    model = model_copy()
    weights = model / "model.safetensors"
    weights.rename(model / "model-00001-of-00002.safetensors")
    refused("capture", model, "-o", "x", said=("no weights in", "all shards"))
    index = {"model.norm.weight": 1, "lm_head.weight": 2}
    index = {key: f"model-0000{n}-of-00002.safetensors" for key, n in index.items()}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    refused("capture", model, "-o", "x", said=("no weights in", "00002-of-00002", "all shards"))


@pytest.mark.parametrize("length", [0, 7, 100, 50_000])
def test_torn_weights(refused, model_copy, length):
    """A download that broke off."""
    weights = model_copy() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    refused("capture", weights.parent, "-o", "x", said=("cannot load", "download it again"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AttributeError("'tuple' object has no attribute 'load_speakers'"), "record(model, out="),
        (OSError("m does not appear to have a file named spk_dict.pt. Checkout"), "spk_dict.pt is"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_no_damaged_file(
    refused, model_copy, monkeypatch, error, said
):
    """What is missing is named, and what runs such a class."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", fail)
    model = model_copy()
    refused("capture", model, "-o", "x", said=("cannot load", said))
    if isinstance(error, AttributeError):  # of a model that speaks
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"thinker_config": {}}))
        refused("capture", model, "-o", "x", said=("cannot load", "model.thinker.save_pretrained"))


@pytest.mark.slow
def test_what_follows_a_model_of_sentences_is_said(model_copy, invoke, tmp_path):
    """What pools its output is no module of it."""
    model = model_copy()
    modules = [
        {"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    how = "--prompt One --max-new-tokens 1 --truth no --no-probe".split()
    code, _, err = invoke("capture", model, "-o", tmp_path / "a", *how)
    assert code == 0 and "Pooling of modules.json did not run" in " ".join(err.split())


def test_weights_that_are_a_damaged_pickle(refused, model_copy):
    """Nor is it a traceback of pickle's."""
    model = model_copy()
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"garbage")
    refused("capture", model, "-o", "x", said="cannot load")


def test_weights_of_another_shape(refused, model_copy):
    """A config of another size than the weights."""
    model = model_copy()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    refused("capture", model, "-o", "x", said="cannot load")


def test_code_that_comes_with_a_model(refused, tiny_model, tmp_path):
    """It needs leave, and whatever it does then is the model's fault."""
    model = tiny_model("remote-code")
    said = ("carries its own modelling code", "--trust-remote-code")
    refused("capture", model, "-o", "x", said=said)
    bad = Path(shutil.copytree(model, tmp_path / "bad"))
    for code in ("syntax error", "raise SystemExit(1)", "import no_such_module_here", "1 / 0"):
        (bad / "modeling_tiny.py").write_text(code + "\n")
        refused("capture", bad, "-o", "x", "--trust-remote-code", said="cannot load")


@pytest.mark.parametrize("source", ["org/evil", "run/evil", "../evil"])
def test_a_run_gives_no_leave_to_run_code(refused, runs, tmp_path, monkeypatch, source):
    """A run from elsewhere may say that its model's code was trusted; that was there, not here."""
    asked = []

    def load_model(loading, **options):
        asked.append((loading.source, loading.trust_remote_code))
        raise ModelError("not loaded")

    monkeypatch.setattr(api, "load_model", load_model)
    shutil.copytree(runs / "a", tmp_path / "run")
    without_digests(tmp_path / "run")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest["model"] |= {"source": source, "trust_remote_code": True}
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    refused("capture", "--like", "run", "-o", "x", said="not loaded")
    refused("capture", "--like", "run", "-o", "x", "--trust-remote-code", said="not loaded")
    assert asked == [(source, False), (source, True)]


# --- how it is to be run -----------------------------------------------------------------------

BAD_OPTIONS = [
    (("--dtype", "float33"), ("'float33'", "did you mean float32")),
    (("--dtype", "int8"), ("cannot be run in dtype int8", "bfloat16")),
    (("--dtype", "fp8"), ("cannot be run in dtype float8_e4m3fn",)),
    (("--device", "cdua"), ("unknown device 'cdua'", "did you mean cuda")),
    (("--device", ""), ("unknown device ''", "known: auto, cpu")),
    (("--device", "cpu:one"), ("'one' is not a number", "cuda:0")),
    (("--device", "cuda:\u00b2"), ("is not a number",)),
    (("--attn-implementation", "nope"), ("'nope' cannot be used", "eager is always there")),
    (("--task", "encoder-decoder"), ("cannot load",)),
    (("--task", "nope"), ("nope",)),
    (("--seed", "9" * 30), ("does not fit 64 bits", "--seed 1")),
    (("--seed", "x"), ("--seed",)),
    (("--max-new-tokens", "-1"), ("--max-new-tokens",)),
    (("--repeat", "0"), ("--repeat",)),
    (("--steps", ""), ("empty part", "0,4-8")),
    (("--steps", "x"), ("'x' is neither a number nor a range", "prefill or decode")),
    (("--steps", "-1"), ("counted from the end",)),
    (("--steps", "5-2"), ("'5-2' holds nothing", "FIRST-LAST")),
    (("--steps", "2"), ("--steps 2 selects nothing", "steps 0 (the prefill) to 1")),
    (("--steps", "9" * 40), ("neither a number nor a range",)),
    (("--positions", "1,,2"), ("empty part",)),
    (("--positions", "8-4"), ("'8-4' holds nothing",)),
    (("--positions", "-1-3"), ("'-1-3' holds nothing",)),
    (("--positions", "last:0"), ("last:0 is no position", "last:16")),
    (("--positions", "last:x"), ("neither a number nor a range", "last:16")),
    (("--sites", "model.layer.0:out"), ("'model.layer.0:out'", "did you mean model.layers.0")),
    (("--sites", "zzz"), ("no module of this model matches", "--sites modules --dry-run")),
    (("--sites", ""), ("no module of this model matches",)),
    (("--sites", "re:("), ("is not a regular expression", "quote it for the shell")),
    (("--sites", "re:nothing"), ("no site of this model matches", "must match the whole site")),
    (("--sites", "x" * 20_000), ("no module of this model matches",)),
    (("--plant", "model.layers.1:out"), ("is not SITE=FAULT", "scale:FACTOR")),
    (("--plant", "model.layers.1=nan"), ("'model.layers.1' is not a site", "MODULE_PATH:PORT")),
    (("--plant", "model.layers.1:out=sacle:2"), ("'sacle'", "did you mean scale")),
    (("--plant", "model.layers.1:out=scale:x"), ("cannot understand", "scale:FACTOR")),
    (("--plant", "model.layers.1:out=scale"), ("cannot understand", "scale:FACTOR")),
    (("--plant", "model.layers.1:out=zero:5-2"), ("holds nothing",)),
    (("--plant", "model.layers.1:out=cast:bool"), ("no number format to round through",)),
    (("--plant", "model.layer.1:out=nan"), ("no module", "did you mean model.layers.1")),
    (("--model", "elsewhere"), ("--model needs --like",)),
    (("--no-anchor",), ("--no-anchor needs --like",)),
    (("--only-changed",), ("--only-changed needs --like",)),
    (("--store", "sketches"), ("'sketches'", "sketch")),
    (("--store", "hash", "--sites", "ops@model.layers.1"), ("keeps not all bytes", "--store full")),
    (("--prompt", ""), ("--prompt number 1 is empty",)),
    (("--prompt", "caf\udce9"), ("is not UTF-8 text", "--prompts FILE")),
    (("--nope",), ("--nope",)),
]


@pytest.mark.parametrize(
    ("options", "said"), BAD_OPTIONS, ids=[" ".join(o)[:40] or "-" for o, _ in BAD_OPTIONS]
)
def test_an_option_that_cannot_be_followed(refused, llama, options, said):
    """Named with its value, and with what would do."""
    refused("capture", llama, "-o", "x", *SHORT, *options, said=said)


@pytest.mark.parametrize("kind", ["cuda", "npu", "xpu", "mps"])
def test_a_device_that_is_not_there(refused, llama, kind):
    """Named, with what is there instead."""
    import torch

    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == kind:
        pytest.skip(f"this machine has {kind}")
    refused("capture", llama, "-o", "x", "--device", kind, said=(f"device {kind} is not there",))
    refused("env", "--device", kind, said=f"device {kind} is not there")


PLANTS = {
    "nan:999999": "index 999999 is out of bounds",
    "channel:9999:2": "index 9999 is out of bounds",
    "zero:0-9999": "feature 9999 of 64",
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_fault_that_does_not_fit_its_tensor(refused, llama, fault):
    """Known only when the tensor is seen; the run begun until then is incomplete."""
    plant = f"model.layers.1:out={fault}"
    said = ("cannot plant", "(1, 51, 64)", PLANTS[fault])
    refused("capture", llama, "-o", "x", *SHORT, "--plant", plant, said=said, leaves=("x",))


def test_a_random_fault_takes_any_seed(invoke, llama):
    """Also one of more than 64 bits."""
    plant = "model.layers.1:out=noise:0.1:" + "9" * 30
    assert invoke("capture", llama, "-o", "x", *SHORT, "--plant", plant)[0] == 0


# --- prompts -----------------------------------------------------------------------------------

BAD_PROMPTS = {
    "none.txt": (None, "cannot be read: No such file"),
    "empty.txt": ("", "holds no prompts"),
    "blank.txt": (" \n\n\t\n", "holds no prompts"),
    "latin.txt": (b"caf\xe9\n", "is not UTF-8 text"),
    "prompts.csv": ("a,b\n", "unknown kind .csv"),
    "prompts": ("a\n", "unknown kind (no suffix)"),
    "key.jsonl": ('{"text": "a"}\n{"txt": "b"}\n', ("unknown field `txt`", "line 2")),
    "two.jsonl": ('{"text": "a", "input_ids": [1]}\n', "give exactly one"),
    "none.jsonl": ("{}\n", "give exactly one"),
    "number.jsonl": ("5\n", "Expected `object`"),
    "mixed.jsonl": ('[1, "a"]\n', "input_ids[1]"),
    "parts.json": ('["a", ["b"]]', "prompt 1"),
    "blank.jsonl": ('{"text": ""}', "the prompt is empty"),
    "negative.jsonl": ('{"input_ids": [-1]}', "input_ids[0]"),
    "broken.jsonl": ('{"text": "a"\n', "line 1"),
    "deep.jsonl": ("[" * 100_000, "line 1"),
    "surrogate.jsonl": ('{"text": "\\ud800"}\n', "line 1"),
    "object.json": ('{"text": "a"}', "not a list of prompts"),
    "empty.json": ("[]", "holds no prompts"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_prompts_file_that_cannot_be_used(refused, llama, tmp_path, name):
    """File and line, and what a prompts file is."""
    content, said = BAD_PROMPTS[name]
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    said = (said,) if isinstance(said, str) else said
    hint = "for example" if "line" in said[-1] else ""
    refused("capture", llama, "-o", "x", "--prompts", name, said=(name, *said, hint))


def test_half_of_a_character_is_no_prompt(refused, llama, tmp_path):
    """JSON may hold one, and no tokenizer takes it."""
    (tmp_path / "half.json").write_text('[{"text": "whole"}, {"text": "\\ud800"}]')
    said = "prompt 1 holds half of a character"
    refused("capture", llama, "-o", "x", "--prompts", "half.json", said=said)


def test_a_directory_of_prompts(refused, llama):
    """Is no file of them."""
    refused("capture", llama, "-o", "x", "--prompts", ".", said="this is a folder")


def test_a_line_separator_inside_a_string_is_no_new_line(invoke, llama, tmp_path):
    """JSON may hold U+2028 as it is; so may a line of text. CRLF and a BOM are taken away."""
    (tmp_path / "p.jsonl").write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    (tmp_path / "p.txt").write_bytes("\ufeffone\u2028more\r\ntwo\r\n".encode())
    for name, count in (("p.jsonl", 1), ("p.txt", 2)):
        assert invoke("capture", llama, "-o", f"r-{name}", *SHORT, "--prompts", name)[0] == 0
        samples = json.loads((tmp_path / f"r-{name}/manifest.json").read_text())["tokens"][
            "samples"
        ]
        assert len(samples) == count
        assert "\u2028" in samples[0]["text"] and "\r" not in samples[-1]["text"]


@pytest.mark.slow
def test_a_prompt_is_what_it_is_without_an_object_around_it(invoke, llama, tmp_path):
    """A text, a list of token ids, a conversation."""
    (tmp_path / "plain.json").write_text('["hi", [1, 2, 3], [{"role": "user", "content": "hi"}]]')
    assert invoke("capture", llama, "-o", "plain", *SHORT, "--prompts", "plain.json")[0] == 0
    samples = json.loads((tmp_path / "plain/manifest.json").read_text())["tokens"]["samples"]
    assert samples[0]["text"] == "hi" and samples[1]["prompt_ids"] == [1, 2, 3]
    assert len(samples) == 3


def test_chats_and_tokens_that_the_model_cannot_take(refused, llama, tiny_model, tmp_path):
    """No template, no tokenizer, ids beyond the vocabulary."""
    bare = tiny_model("llama", chat_template=False)
    said = ("no chat template", "give plain text")
    refused("capture", bare, "-o", "x", "--chat", said=said)
    (tmp_path / "far.jsonl").write_text('{"input_ids": [3, 99999]}')
    said = ("token id 99999", "vocabulary of 512", "another model")
    refused("capture", llama, "-o", "far", "--prompts", "far.jsonl", said=("prompt 0", *said))


def test_a_prompt_beyond_the_models_positions(refused, tiny_model, tmp_path):
    """A position table that ends before the prompt does is named, and is no fault of the tool."""
    model = tiny_model("gpt2")
    ids = ", ".join(["5"] * 3000)
    (tmp_path / "long.jsonl").write_text(f'{{"input_ids": [{ids}]}}')
    said = ("the forward pass failed", "the prompt has 3000 tokens", "positions")
    refused("capture", model, "-o", "x", "--prompts", "long.jsonl", said=said, leaves=("x",))


def test_a_selection_that_records_nothing(refused, llama):
    """A port that no module has is an error, not an empty run that passes."""
    said = ("nothing was recorded", "--sites modules --dry-run")
    refused(
        "capture",
        llama,
        "-o",
        "x",
        *SHORT,
        "--sites",
        "model.layers.0:out.nowhere",
        said=said,
        leaves=("x",),
    )


def test_a_model_without_a_tokenizer(refused, invoke, model_copy, tmp_path):
    """Text cannot be read; token ids can."""
    model = model_copy()
    (model / "tokenizer.json").write_text("{")
    said = ("no usable tokenizer", "input_ids")
    refused("capture", model, "-o", "x", said=said)
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [3, 4]}')
    assert invoke("capture", model, "-o", "x", *SHORT, "--prompts", "ids.jsonl")[0] == 0


# --- where it is written -----------------------------------------------------------------------


def test_a_place_that_cannot_be_written(refused, llama, tmp_path):
    """A full directory, a file, a device, a file system that takes no files."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious.txt").write_text("x")
    (tmp_path / "full.tar").mkdir()
    (tmp_path / "file").write_text("x")
    capture = ("capture", llama, *SHORT, "-o")
    refused(*capture, "full", said=("full exists already", "-o"))
    refused(*capture, "full", "--force", said="full holds precious.txt")
    refused(*capture, "file", said=("is not a directory", "choose another directory with -o"))
    refused(*capture, "full.tar", said=("is not a file", "choose another name with -o"))
    refused(*capture, "file", "--force", said="is not a directory")
    refused(*capture, "/dev/full", said="is not a directory")
    refused(
        *capture, "/proc/run", said=("nothing can be written there", "choose another place with -o")
    )
    refused("capture", llama, said=("there is no directory to write to", "--dry-run"))
    assert (tmp_path / "full/precious.txt").read_text() == (tmp_path / "file").read_text() == "x"


def test_force_does_not_remove_what_is_no_run(refused, llama, tmp_path):
    """A manifest.json among other files is somebody else's."""
    (tmp_path / "extension").mkdir()
    for name in ("manifest.json", "popup.html"):
        (tmp_path / "extension" / name).write_text("{}")
    said = ("holds popup.html", "--force does not remove it")
    refused("capture", llama, *SHORT, "-o", "extension", "--force", said=said)
    assert sorted(path.name for path in (tmp_path / "extension").iterdir()) == [
        "manifest.json",
        "popup.html",
    ]


@pytest.mark.slow
def test_odd_names_are_names(invoke, llama, tmp_path):
    """Brackets, spaces, quotes, other alphabets, bytes that are no text."""
    for name in ("a [red]b[/red] ü 'x' \"y\" 名前", "-", "caf\udce9"):
        code, _, err = invoke("capture", llama, *SHORT, "-o", f"./{name}")
        assert code == 0, err
        assert invoke("inspect", f"./{name}", "--verify")[0] == 0
        code, out, err = invoke("compare", f"./{name}", f"./{name}")
        assert code == 0, err
        assert "a run compared with itself proves nothing" in out


def test_a_home_directory_in_quotes(invoke, llama, tmp_path, monkeypatch):
    """'~/run' means the same to the writer and to the reader."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert invoke("capture", llama, *SHORT, "-o", "~/run")[0] == 0
    assert (tmp_path / "run/manifest.json").is_file()
    assert invoke("capture", llama, *SHORT, "-o", "~nobody-here")[0] == 0
    assert (tmp_path / "~nobody-here/manifest.json").is_file()


@pytest.mark.slow
def test_an_answer_that_cannot_be_written(runs):
    """A full disk behind stdout is no success."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "divergence", "inspect", str(runs / "a"), "--json"],
            cwd=Path(__file__).parents[2],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode not in (0, 1)
    assert "No space left" in done.stderr


# --- repeating ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_cannot_be_repeated(refused, runs, llama, tmp_path):
    """No run, prompts beside it, onto itself, steps that it does not have."""
    shutil.copytree(runs / "a", tmp_path / "a")
    (tmp_path / "empty").mkdir()
    like = ("capture", "--like")
    refused(*like, "none", "-o", "x", said=("none does not exist", "-o RUN"))
    refused(*like, "empty", "-o", "x", said=("is not a run", "no manifest.json"))
    refused(*like, llama, "-o", "x", said=("is not a run but a model", f"capture {llama}"))
    for extra in (("--prompt", "x"), ("--chat",)):
        refused(*like, "a", "-o", "x", *extra, said=("repeats the recorded tokens", "leave out"))
    refused(*like, "a", "-o", "a", said=("is the run to be repeated", "another -o"))
    refused(*like, "a", "-o", "./empty/../a", "--force", said="is the run to be repeated")
    refused(*like, "a", "-o", "x", "--steps", "50", said="--steps 50 selects nothing")
    more = ("--max-new-tokens", "9")
    refused(*like, "a", "-o", "x", *more, said=("to be repeated has 2", "capture without --like"))
    refused(*like, "a", "-o", "x", "--model", "./none", said="no such model")
    refused(*like, "a", llama, "-o", "x", said=("recorded one", "--model"))
    assert (tmp_path / "a/manifest.json").is_file()


def test_a_damaged_run_is_not_repeated(refused, runs, tmp_path):
    """File and what is wrong, before the model is loaded."""
    shutil.copytree(runs / "a", tmp_path / "a")
    shard = next((tmp_path / "a/tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-9])
    refused("capture", "--like", "a", "-o", "x", said=("cut off", shard.name))
    (tmp_path / "a/manifest.json").write_text("")
    refused("capture", "--like", "a", "-o", "x", said="manifest.json is empty")


IMPOSSIBLE = {
    "no tokens": (lambda m: m["tokens"]["samples"][0].update(prompt_ids=[]), "no tokens"),
    "steps": (lambda m: m["plan"].update(steps="x"), "'x' is neither"),
    "positions": (lambda m: m["plan"].update(positions="5-2"), "'5-2' holds nothing"),
    "seed": (lambda m: m["settings"].update(seed=10**30), "64 bits"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_run_by_another_writer_that_cannot_be_repeated(refused, runs, tmp_path, name):
    """It is readable, and says what no capture can do; the model is not loaded for it."""
    change, said = IMPOSSIBLE[name]
    shutil.copytree(runs / "a", tmp_path / "a")
    without_digests(tmp_path / "a")
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    change(manifest)
    (tmp_path / "a/manifest.json").write_text(json.dumps(manifest))
    said = ("a cannot be repeated", said, "manifest.json")
    refused("capture", "--like", "a", "-o", "x", said=said)


# --- comparing ---------------------------------------------------------------------------------


def test_runs_that_cannot_be_read(refused, runs):
    """The missing one is named."""
    for command in ("compare", "check"):
        refused(command, runs / "a", "none", said="none does not exist")
        refused(command, "none", runs / "a", said="none does not exist")
    refused("compare", runs, runs / "a", said=("is not a run", "it holds"))
    refused("inspect", "none", said="none does not exist")


def test_a_model_is_no_run_and_a_run_is_no_model(refused, runs, llama):
    """Two arguments that are easily taken for each other: the error gives the command meant."""
    refused("compare", llama, runs / "a", said=("is not a run but a model", f"capture {llama} -o"))
    refused("capture", runs / "a", "-o", "x", said=("is not a model but a run", "--like"))


@pytest.mark.whole
def test_a_models_file_is_no_run_and_no_losses(refused, runs, llama):
    """Files that ``compare`` takes are compared with such files."""
    refused("compare", runs / "a", f"{llama}/config.json", said=("runs with runs", "config.json"))


def test_runs_with_nothing_in_common(refused, runs):
    """Nothing compared is never a pass."""
    refused("compare", runs / "head", runs / "first", said=("nothing was compared", "--map FILE"))
    refused("check", runs / "head", runs / "first", said="nothing was compared")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"), [("weights", "other weights"), ("tokens", "the prompts differ")]
)
def test_two_experiments(invoke, refused, runs, name, check):
    """Other weights or tokens: exit code 2 in either direction, with --exit-code too."""
    for pair in ((runs / "a", runs / name), (runs / name, runs / "a")):
        for options in ((), ("--exit-code",), ("-q",), ("--json",)):
            code, out, err = invoke("compare", *pair, *options)
            assert code == 2, err
            said = "incomparable" if "--json" in options else f"STOPPED: {check}"
            assert said in out
        code, _, err = invoke("check", *pair)
        assert code == 2
        assert check in err


def test_other_tokens_by_force(invoke, runs):
    """Still no crash, and still nothing to compare."""
    code, _, err = invoke("compare", runs / "a", runs / "tokens", "--force")
    assert code == 2
    assert "nothing was compared" in err
    assert " against " in err
    assert f"divergence compare {runs / 'a'} {runs / 'tokens'} says what stops" in err


@pytest.mark.slow
def test_nan_on_one_side_is_a_divergence(invoke, runs):
    """1 from check and from --exit-code, 0 from a plain compare, which only answers."""
    for pair in ((runs / "a", runs / "nan"), (runs / "nan", runs / "a")):
        code, out, _ = invoke("compare", *pair)
        assert code == 0
        assert out.startswith("NAN OR INF")
        assert invoke("compare", *pair, "--exit-code")[0] == 1
        json.loads(invoke("compare", *pair, "--json")[1], parse_constant=pytest.fail)
    assert invoke("check", runs / "a", runs / "nan")[0] == 1
    code, _, err = invoke("check", runs / "nan", runs / "a")
    assert code == 2 and "is no golden: it carries planted faults" in err


BAD_POLICIES = {
    "key.toml": ("foo = 1\n", "unknown key 'foo'"),
    "verdict.toml": ('verdicts = ["nice"]\n', "verdicts[0]"),
    "syntax.toml": ("x = [\n", "not TOML"),
    "latin.toml": (b"\xff\n", "not UTF-8"),
    "regex.toml": ('[[tolerance]]\nsites = "re:("\nrel_l2 = 1\n', "regular expression"),
    "none.toml": (None, "no policy"),
}


@pytest.mark.parametrize("name", BAD_POLICIES)
def test_a_policy_that_cannot_be_used(refused, runs, tmp_path, name):
    """A policy with a typing error must never pass."""
    content, said = BAD_POLICIES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("check", runs / "a", runs / "a", "--policy", name, said=said)


def test_maps_csv_and_sites_that_cannot_be_used(refused, runs, tmp_path):
    """The other files and patterns that a user names."""
    (tmp_path / "map.toml").write_text("foo = 1\n")
    pair = (runs / "a", runs / "a", "-q")
    refused("compare", *pair, "--map", "none.toml", said="none.toml")
    refused("compare", *pair, "--map", "map.toml", said="unknown key 'foo'")
    for place in ("/dev/full", "/none/x.csv", "."):
        refused("compare", *pair, "--csv", place, said=("cannot write the CSV", place))
    refused("inspect", runs / "a", "--site", "model.layer.0:out", said="did you mean")
    refused("inspect", runs / "a", "--site", "re:(", said="regular expression")


@pytest.mark.slow
def test_a_model_whose_code_mixes_dtypes(refused, tmp_path):
    """XLNet in bfloat16: its -1 positions are no limit, and float32 is what is left."""
    sizes = {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes))
    model.save_pretrained(tmp_path / "xlnet")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"input_ids": [5, 6, 7]}\n')
    refused(
        "capture",
        tmp_path / "xlnet",
        "-o",
        "x",
        "--dtype",
        "bfloat16",
        "--prompts",
        prompts,
        said=("the forward pass failed", "mixes dtypes", "--dtype float32"),
        leaves=("x",),
    )


def test_a_forward_that_fails_by_itself_is_sent_nowhere_else(llama, tmp_path, monkeypatch):
    """What takes pictures or sound may lack them; a language model does not."""

    def failing(*_):
        raise RuntimeError("no such kernel")

    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    monkeypatch.setattr(mlp, "forward", failing)
    with pytest.raises(ModelError, match="the forward pass failed: no such kernel") as caught:
        capture(llama, out=tmp_path / "a", prompts=["One"], max_new_tokens=1, probe=False)
    assert caught.value.hint is None


def test_a_folder_of_another_library_says_what_takes_it(refused, tmp_path):
    """Of diffusers a pipeline and one of its models; their files are whole."""
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (tmp_path / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    refused("capture", tmp_path, "-o", "x", said=("a pipeline of diffusers", "record(module"))
    refused("capture", tmp_path / "unet", "-o", "x", said=("a model of diffusers", "record(module"))
