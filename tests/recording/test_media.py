"""Prompts with pictures and sound: what the processor made is kept in the run, towers are sites
like others, and other pictures or processors are said before any number."""

import json
import os
import shutil
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from divergence import Run, capture, check, compare, truth
from divergence.cli.main import app
from divergence.errors import ModelError, PromptError, UsageError
from divergence.options.commands import BatchOptions, RecordOptions

TEXT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
)
TOWER = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
)
SAID = "<|startoftranscript|><|en|><|transcribe|>"
SEEN = {
    "llava": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_audio": "<|AUDIO|>",
    "mllama": "<|image|>",
}


def tokenizer(specials: list[str], **named: str):
    """A byte-level BPE, trained here."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet
    )
    trained.train_from_iterator(["what is in the picture, and what is it that one hears"], trainer)
    ends = {"pad_token": specials[0], "bos_token": specials[1], "eos_token": specials[2]}
    return hf.PreTrainedTokenizerFast(tokenizer_object=trained, extra_special_tokens=named, **ends)


def template(name: str) -> str:
    return (
        "{% for m in messages %}<|{{ m.role }}|>{% for c in m.content %}{% if c.type == 'image' %}"
        + SEEN[name]
        + "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}<|assistant|>"
    )


def build_llava():
    ids = tokenizer(["<pad>", "<s>", "</s>", "<image>"], image_token="<image>")
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        ids,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("llava"),
    )
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, projection_dim=16),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=len(ids)),
        image_token_index=ids.convert_tokens_to_ids("<image>"),
    )
    return hf.LlavaForConditionalGeneration(config), processor


def build_gemma3():
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    ids = tokenizer(["<pad>", "<bos>", "<eos>", *names.values()], **names)
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        ids,
        image_seq_length=4,
        chat_template=template("gemma3"),
    )
    config = hf.Gemma3Config(
        vision_config=TOWER,
        text_config=dict(TEXT, vocab_size=len(ids), head_dim=16, sliding_window=8),
        mm_tokens_per_image=4,
        **{f"{n}_index": ids.convert_tokens_to_ids(text) for n, text in names.items()},
    )
    return hf.Gemma3ForConditionalGeneration(config), processor


def build_qwen(version: str = "2"):
    names = {
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
    }
    ids = tokenizer(["<pad>", "<s>", "</s>", *names.values()])
    numbers = {f"{n}_token_id": ids.convert_tokens_to_ids(text) for n, text in names.items()}
    small = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 16}
    processor = hf.Qwen2VLProcessor(
        hf.Qwen2VLImageProcessorPil(**small),
        ids,
        hf.Qwen2VLVideoProcessor(),
        chat_template=template("qwen2_vl"),
    )
    turning = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = dict(TEXT, vocab_size=len(ids), rope_parameters=turning)
    if version == "2":
        tower = dict(depth=3, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
        config = hf.Qwen2VLConfig(text_config=text, vision_config=tower, **numbers)
        return hf.Qwen2VLForConditionalGeneration(config), processor
    tower = dict(depth=3, hidden_size=32, out_hidden_size=32, num_heads=2, intermediate_size=64)
    tower |= dict(window_size=56, fullatt_block_indexes=[1])
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **numbers)
    return hf.Qwen2_5_VLForConditionalGeneration(config), processor


def build_mllama():
    ids = tokenizer(["<pad>", "<s>", "</s>", SEEN["mllama"]])
    processor = hf.MllamaProcessor(
        hf.MllamaImageProcessorPil(size={"height": 32, "width": 32}, max_image_tiles=2),
        ids,
        chat_template=template("mllama"),
    )
    tower = dict(hidden_size=32, intermediate_size=64, attention_heads=2, image_size=32)
    tower |= dict(patch_size=8, num_hidden_layers=2, num_global_layers=1, max_num_tiles=2)
    tower |= dict(vision_output_dim=64, intermediate_layers_indices=[1])
    turning = {"rope_type": "default", "rope_theta": 10000.0}
    text = dict(TEXT, vocab_size=len(ids), cross_attention_layers=[1], rope_parameters=turning)
    config = hf.MllamaConfig(
        vision_config=dict(tower, supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]]),
        text_config=dict(text, pad_token_id=0),
        image_token_index=ids.convert_tokens_to_ids(SEEN["mllama"]),
    )
    return hf.MllamaForConditionalGeneration(config), processor


def build_whisper():
    ids = tokenizer(["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>"])
    processor = hf.WhisperProcessor(hf.WhisperFeatureExtractor(feature_size=8, chunk_length=2), ids)
    layers = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 64))
    }
    config = hf.WhisperConfig(
        vocab_size=len(ids),
        d_model=32,
        num_mel_bins=8,
        max_source_positions=100,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **layers,
    )
    return hf.WhisperForConditionalGeneration(config), processor


def build_qwen2_audio():
    ids = tokenizer(["<pad>", "<s>", "</s>", SEEN["qwen2_audio"]])
    processor = hf.Qwen2AudioProcessor(
        hf.WhisperFeatureExtractor(feature_size=8, chunk_length=2),
        ids,
        chat_template=template("qwen2_audio").replace("'image'", "'audio'"),
    )
    tower = dict(d_model=32, encoder_layers=3, encoder_attention_heads=2, encoder_ffn_dim=64)
    config = hf.Qwen2AudioConfig(
        audio_config=dict(tower, num_mel_bins=8, max_source_positions=100),
        text_config=dict(TEXT, model_type="qwen2", vocab_size=len(ids)),
        audio_token_index=ids.convert_tokens_to_ids(SEEN["qwen2_audio"]),
    )
    return hf.Qwen2AudioForConditionalGeneration(config), processor


BUILT = {
    "llava": build_llava,
    "gemma3": build_gemma3,
    "qwen2_vl": build_qwen,
    "qwen2_5_vl": lambda: build_qwen("2.5"),
    "mllama": build_mllama,  # transformers has a class for its text alone as well
    "qwen2_audio": build_qwen2_audio,
    "whisper": build_whisper,
}
HEARD = ("qwen2_audio", "whisper")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def model(folder):
    """Small models with random weights and biases, by name; each beside a processor of its own."""

    def build(name: str) -> Path:
        if name not in HEARD:
            pytest.importorskip("PIL")
        if name.startswith("qwen"):
            pytest.importorskip("torchvision")  # its processor of videos
        place = folder / name
        if not place.exists():
            torch.manual_seed(0)
            built, processor = BUILT[name]()
            for parameter in built.parameters():
                if not parameter.any():  # biases, and Gemma's projector
                    torch.nn.init.normal_(parameter, std=0.02)
            built.save_pretrained(place)
            processor.save_pretrained(place)
        return place

    return build


def draw(path: Path, seed: int = 0) -> None:
    from PIL import Image

    y, x = np.mgrid[0:60, 0:80]
    pixels = np.stack([x * 3, y * 4, (x * y + 40 * seed) % 256], axis=-1)
    Image.fromarray(pixels.astype("uint8")).save(path)


def play(path: Path, rate: int = 16000) -> None:
    times = np.arange(rate) / rate
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((9000 * np.sin(2000 * times * (1 + times))).astype("<i2").tobytes())


def prompts(folder: Path, name: str, seed: int = 0) -> Path:
    """A file of two prompts, the first of them with a file."""
    file = folder / f"{name}-{seed}.jsonl"
    if name in HEARD:
        play(folder / "a.wav")
        second = {"audio": ["a.wav"]} if name == "whisper" else {"text": "what is it"}
        lines = [{"audio": ["a.wav"], "text": SAID}, second]
    else:
        draw(folder / f"{seed}.png", seed)
        lines = [{"text": "what is it", "images": [f"{seed}.png"]}, {"text": "what is it"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def captured(place: Path, out: Path, name: str, **options):
    options = {"max_new_tokens": 3, "probe": False, "truth": "full", **options}
    return capture(place, out=out, prompts_file=prompts(out.parent, name), **options)


@pytest.mark.parametrize("name", BUILT)
def test_a_run_is_repeated_without_files_and_processor(model, tmp_path, name):
    """Decode steps, the anchored pass and a truth too; it holds what the processor made."""
    place = tmp_path / "model"
    shutil.copytree(model(name), place)
    a = captured(place, tmp_path / "a", name)
    assert a.manifest.plan.truth.stopped_by is None
    sample = a.manifest.tokens.samples[0]
    (note,) = sample.media
    assert (len(note.digest), Path(note.path).parent) == (32, tmp_path)
    assert {"pixel_values", "input_features"} & set(sample.inputs)
    assert a.manifest.tokens.processor["processor_class"].endswith("Processor")
    for file in (*place.glob("*process*"), *tmp_path.glob("*.png"), *tmp_path.glob("*.wav")):
        file.unlink()
    b = capture(like=a, out=tmp_path / "b", probe=False)
    assert b.manifest.tokens.samples[0].inputs == sample.inputs
    report = compare(a, b, truth=truth(a, out=tmp_path / "t").path)
    assert (report.verdict.kind, report.verdict.confidence) == ("identical", "high")
    assert not report.not_exercised
    towers = [p for p, note in a.manifest.plan.modules.items() if note.role == "block"]
    assert {path for site in report.sites for path in towers if site.site == f"{path}:out"} == set(
        towers
    )


def scaled(path):
    """A module's result, wrong by 1%."""

    def wrong(module, args, output):
        return (output[0] * 1.01, *output[1:]) if isinstance(output, tuple) else output * 1.01

    return lambda model: model.get_submodule(path).register_forward_hook(wrong) and None


def without_bias(path):
    def prepare(model):
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, args, output: output - module.bias)

    return prepare


def one_axis(model):
    """Positions in a picture as those of text: mrope's height and width forgotten."""
    whole = model.model.get_rope_index

    def flat(*args, **kwargs):
        positions, deltas = whole(*args, **kwargs)
        return positions[:1].expand_as(positions), deltas

    model.model.get_rope_index = flat


TOWER_PATH = "model.vision_tower.encoder.layers"


@pytest.mark.parametrize(
    ("name", "fault", "site"),
    [
        ("llava", scaled(f"{TOWER_PATH}.1.mlp.fc1"), f"{TOWER_PATH}.1:out"),
        (
            "llava",
            without_bias("model.multi_modal_projector.linear_2"),
            "model.multi_modal_projector:out",
        ),
        (
            "llava",
            scaled("model.language_model.layers.0.mlp.down_proj"),
            "model.language_model.layers.0:out",
        ),
        ("gemma3", scaled("model.multi_modal_projector"), "model.multi_modal_projector:out"),
        ("gemma3", scaled(f"{TOWER_PATH}.2.self_attn.out_proj"), f"{TOWER_PATH}.2:out"),
        ("qwen2_vl", one_axis, "model.language_model.rotary_emb:out"),
        ("qwen2_vl", scaled("model.visual.merger"), "model.visual.merger:out"),
        ("qwen2_5_vl", scaled("model.visual.blocks.1.mlp"), "model.visual.blocks.1:out"),
        ("qwen2_audio", scaled("model.audio_tower.layers.1.fc2"), "model.audio_tower.layers.1:out"),
        ("whisper", scaled("model.encoder.conv1"), "model.encoder.conv1:out"),
        ("whisper", scaled("model.encoder.layers.2.fc1"), "model.encoder.layers.2:out"),
        (
            "whisper",
            scaled("model.decoder.layers.1.encoder_attn.out_proj"),
            "model.decoder.layers.1:out",
        ),
    ],
)
def test_a_fault_is_named_where_it_is_made(model, tmp_path, name, fault, site, answer):
    """In towers, in what joins them to the text, and in the text."""
    a = captured(model(name), tmp_path / "a", name)
    verdict = answer(a, fault).verdict
    assert (verdict.kind, verdict.side, verdict.onset.site) == ("localized", "candidate", site)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BUILT)
def test_other_kernels_only_round(model, tmp_path, name, dtype):
    """Another instruction set of this CPU, in another process."""
    a = captured(model(name), tmp_path / "a", name, dtype=dtype)
    command = [sys.executable, "-m", "divergence", "capture", "--like", str(a.path)]
    switches = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    switches |= {"MKL_CBWR": "COMPATIBLE"}
    subprocess.run(
        [*command, "-o", str(tmp_path / "b")], env=os.environ | switches, check=True, timeout=300
    )
    report = compare(a, tmp_path / "b")
    assert report.verdict.kind in ("identical", "within_floor")
    assert not [site for site in report.sites if site.flagged]


@pytest.mark.slow
def test_other_files_and_processors_are_said_before_any_number(model, tmp_path):
    """Which file, or which setting; the comparison of the two runs stops there."""
    place = tmp_path / "model"
    shutil.copytree(model("llava"), place)
    a = captured(place, tmp_path / "a", "llava")
    other = capture(
        place,
        out=tmp_path / "b",
        prompts_file=prompts(tmp_path, "llava", seed=3),
        max_new_tokens=3,
        probe=False,
    )
    verdict = compare(a, other).verdict
    assert verdict.kind == "incomparable"
    assert verdict.summary.startswith("pixel_values of prompt 0 differ: other files: ")
    assert verdict.summary.endswith("3.png")
    file = place / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["resample"] = 0
    file.write_text(json.dumps(settings))
    nearest = captured(place, tmp_path / "c", "llava")
    shown = CliRunner().invoke(app, ["compare", str(a.path), str(nearest.path)]).stdout
    assert shown.startswith("STOPPED: pixel_values of prompt 0 differ: the same files, another")
    assert "image_processor.resample 3 / 0" in " ".join(shown.split())
    text = capture(
        place, out=tmp_path / "d", prompts=["what is it"] * 2, max_new_tokens=3, probe=False
    )
    assert "other files: " in compare(a, text).verdict.summary
    # a processor that leaves room for other patches than the tower makes
    del settings["image_processor"]["resample"]
    file.write_text(json.dumps(settings | {"patch_size": 16}))
    with pytest.raises(ModelError, match="Image features and image tokens do not match"):
        captured(place, tmp_path / "e", "llava")


@pytest.mark.slow
def test_a_golden_and_a_run_of_digests_keep_them(model, tmp_path, answer):
    """They are small beside the rest, and nothing is repeated without them."""
    place = model("whisper")
    a = captured(place, tmp_path / "a", "whisper", store="hash", truth="no")
    assert answer(a).verdict.kind == "identical"
    full = captured(place, tmp_path / "full", "whisper")
    blessed = CliRunner().invoke(
        app, ["check", str(tmp_path / "golden"), str(full.path), "--bless"]
    )
    assert blessed.exit_code == 0
    repeated = capture(like=tmp_path / "golden", out=tmp_path / "c", probe=False)
    assert check(tmp_path / "golden", repeated).passed
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "golden"), "-v"]).stdout
    assert "a.wav" in inspected


@pytest.mark.slow
def test_sound_that_no_model_hears_is_told(model, tmp_path):
    """Whisper's processor keeps the first 2 s."""
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(b"\0\1" * 16000 * 5)
    (tmp_path / "long.jsonl").write_text(json.dumps({"audio": ["long.wav"]}))
    arguments = [str(model("whisper")), "--prompts", str(tmp_path / "long.jsonl"), "--no-probe"]
    shown = CliRunner().invoke(app, ["capture", *arguments, "-o", str(tmp_path / "a")])
    assert "prompt 0 has 5 s of sound, of which WhisperProcessor keeps 2 s" in shown.output


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_a_cache_is_held_against_whole_forwards(model, tmp_path, name):
    """Tensors with a number for each token go on behind the prompt."""
    recording = RecordOptions(whole=True)
    a = captured(model(name), tmp_path / "a", name, recording=recording)
    b = captured(model(name), tmp_path / "b", name, batching=BatchOptions(use_cache=False))
    assert a.manifest.tokens.samples[0].generated_ids == b.manifest.tokens.samples[0].generated_ids
    assert compare(a, b).verdict.kind in ("identical", "within_floor")


@pytest.mark.slow
@pytest.mark.whole
def test_what_such_prompts_are_not_run_with_is_refused(model, tmp_path, monkeypatch):
    """Each with a word of its own, and none of them after the model has run."""
    place = model("whisper")
    file = str(prompts(tmp_path, "whisper"))
    for option in (["--batch"], ["--dry-run"], ["--train"]):
        arguments = ["capture", str(place), "--prompts", file, "-o", str(tmp_path / "a"), *option]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, option
    with pytest.raises(UsageError, match="a prompt with pictures or sound runs by itself"):
        captured(place, tmp_path / "a", "whisper", batching=BatchOptions(batch=True))
    with pytest.raises(PromptError, match="pictures or sound, which are not read here"):
        capture(endpoint="http://127.0.0.1:9", out=tmp_path / "a", prompts_file=file)
    with pytest.raises(ModelError, match="and prompts hold text") as error:
        capture(place, out=tmp_path / "a", prompts=["what"])
    assert '{"audio": ["..."]}' in str(error.value.hint)

    def given(line, name="odd.jsonl"):
        (tmp_path / name).write_text(json.dumps(line))
        return capture(place, out=tmp_path / "a", prompts_file=tmp_path / name, probe=False)

    with pytest.raises(PromptError, match=r"none\.wav"):
        given({"audio": ["none.wav"]})
    with pytest.raises(PromptError, match="beside text or messages"):
        given({"audio": ["a.wav"], "input_ids": [1]})
    for size in (30, 1000):  # in the header, and in the samples
        (tmp_path / "cut.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:size])
        with pytest.raises(PromptError, match="the sound is cut off"):
            given({"audio": ["cut.wav"]})
    play(tmp_path / "slow.wav", rate=8000)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setattr(
        "transformers.audio_utils.load_audio", lambda *_, **__: __import__("soundfile")
    )
    with pytest.raises(PromptError, match="no WAV of 16 bits at 16000 Hz") as error:
        given({"audio": ["slow.wav"]})
    assert "divergence-debug[media]" in str(error.value.hint)


def test_a_text_model_says_that_it_reads_no_pictures(tiny_model, tmp_path):
    """It has a tokenizer and no processor."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a", "images": ["a.png"]}))
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(ModelError, match="no processor of pictures or sound"):
        capture(tiny_model("llama"), out=tmp_path / "a", prompts_file=tmp_path / "p.jsonl")


@pytest.mark.slow
def test_a_run_names_no_argument_of_the_model(model, tmp_path):
    """What a run holds is passed on only where the model takes a tensor of that name."""
    a = captured(model("whisper"), tmp_path / "a", "whisper", truth="no")
    for file in ("manifest.json", "records.jsonl"):
        text = (a.path / file).read_text()
        (a.path / file).write_text(text.replace("input_features", "custom_generate"))
    manifest = json.loads((a.path / "manifest.json").read_text())
    manifest |= {"digest": None, "record_digests": {}}
    (a.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="takes no custom_generate"):
        capture(like=Run.open(a.path), out=tmp_path / "b", probe=False)


# Models that read pictures beside text, given text alone: it is run, and what rests is said.


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A tower for pictures before a Llama."""
    torch.manual_seed(0)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, projection_dim=16),
        text_config=hf.LlamaConfig(**TEXT, vocab_size=128),
        image_token_index=5,
    )
    folder = tmp_path_factory.mktemp("llava") / "model"
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_prompts_of_text_run_the_text_of_a_model_with_pictures(llava, tmp_path):
    """With its anchored passes and its own truth; the tower that nothing ran is named."""
    a = capture(llava, out=tmp_path / "a", prompts=[[1, 7, 8, 9]], max_new_tokens=2, truth="full")
    assert a.manifest.plan.truth.stopped_by is None
    b = capture(like=a, out=tmp_path / "b")
    assert "anchored" in b.manifest.plan.passes
    report = compare(a, b)
    assert report.verdict.kind == "identical"
    assert [each.name for each in report.not_exercised] == [
        "model.vision_tower",
        "model.multi_modal_projector",
    ]
    assert Run.open(truth(a, out=tmp_path / "t").path).manifest.complete


@pytest.mark.slow
def test_a_fault_in_its_text_is_found(llava, tmp_path, answer):
    """As in any other model."""
    prompts = [[1, 7, 8, 9] * 4]
    a = capture(llava, out=tmp_path / "a", prompts=prompts, max_new_tokens=2, truth="full")

    def wrong(model):
        block = model.model.language_model.layers[1]
        block.register_forward_hook(lambda module, args, output: output * 1.01)

    verdict = answer(a, wrong).verdict
    assert (verdict.side, verdict.onset.site) == ("candidate", "model.language_model.layers.1:out")


@pytest.mark.parametrize(
    ("name", "config", "reads"),
    [
        ("ViTForImageClassification", hf.ViTConfig(**TOWER), "pixel_values"),
        (
            "WhisperForConditionalGeneration",
            hf.WhisperConfig(
                vocab_size=128,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                num_mel_bins=8,
                max_source_positions=16,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
            "input_features",
        ),
    ],
)
def test_a_model_of_pictures_or_sound_alone_says_so(tmp_path, name, config, reads):
    """Its files are whole; what its processor makes of a file runs it."""
    getattr(hf, name)(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match=f"reads {reads}, and prompts hold text") as error:
        capture(tmp_path / "m", out=tmp_path / "a", prompts=["no tokenizer lies there"])
    assert "inputs=" in str(error.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp", "tp"])
def test_ranks_record_what_one_process_repeats(model, tmp_path, mesh):
    """Each rank has the pictures and, of a model whose text is divided, the whole tower."""
    place, out = model("llava"), tmp_path / "ranks"
    jobs = [{"model": str(place), "out": str(out), "mesh": mesh, "device": "cpu", "probe": False}]
    jobs[0] |= {"prompts_file": str(prompts(tmp_path, "llava")), "max_new_tokens": 2}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    program = Path(__file__).with_name("ranks_program.py")
    subprocess.run([sys.executable, program, tmp_path / "jobs.json", "2"], check=True, timeout=300)
    report = compare(out, capture(like=out, out=tmp_path / "one", probe=False))
    assert report.verdict.kind in ("identical", "within_floor")
    assert {f"{TOWER_PATH}.1:out", "model.multi_modal_projector:out"} <= {
        site.site for site in report.sites if site.pass_ == "anchored"
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_processor_s_labels_are_no_input(tmp_path):
    """PaliGemma's makes some, with which the model would give a loss before its logits."""
    pytest.importorskip("PIL")
    ids = tokenizer(["<pad>", "<bos>", "<eos>", "<image>"], image_token="<image>")
    images = hf.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, ids)
    config = hf.PaliGemmaConfig(
        vision_config=dict(TOWER, model_type="siglip_vision_model", projection_dim=32),
        text_config=dict(TEXT, model_type="gemma", head_dim=16, vocab_size=len(ids)),
        image_token_index=ids.convert_tokens_to_ids("<image>"),
        projection_dim=32,
        hidden_size=32,
    )
    hf.PaliGemmaForConditionalGeneration(config).save_pretrained(tmp_path / "m")
    processor.save_pretrained(tmp_path / "m")
    draw(tmp_path / "a.png")
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "<image>what", "images": ["a.png"]}))
    a = capture(tmp_path / "m", out=tmp_path / "a", prompts_file=tmp_path / "p.jsonl", probe=False)
    logits = a.find(("free", 0, 0, ".:out"))
    assert logits is not None and logits.shape[-1] == len(ids)


def test_a_picture_that_is_cut_off(model, tmp_path):
    """An error names the file, and no buffer."""
    place = model("llava")
    draw(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:40])
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a", "images": ["cut.png"]}))
    with pytest.raises(PromptError, match=r"cut\.png|no picture") as error:
        capture(place, out=tmp_path / "a", prompts_file=tmp_path / "p.jsonl")
    assert "BytesIO" not in str(error.value)
