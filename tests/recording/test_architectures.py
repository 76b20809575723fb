"""Every architecture: captured, repeated on the same machine, compared."""

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from divergence import capture, compare
from divergence.errors import PromptError
from divergence.recording.engines.load import resolve_task
from divergence.run.site import module_of
from tests.models import tiny

HEADS = [("llama", True), ("qwen3", False), ("gpt2", False), ("gemma3", False), ("mamba", False)]
DECODERS = [name for name in tiny.ARCHITECTURES if name != "bert"]


def blocks_of(run) -> list[str]:
    return [path for path, note in run.manifest.plan.modules.items() if note.role == "block"]


def check(run, again):
    """The two runs are one: every bit equal, in both passes, nothing left out."""
    report = compare(run, again)
    assert report.verdict.kind == "identical", report.verdict
    assert again.manifest.plan.passes == ["free", "anchored"]
    assert again.manifest.plan.anchored_to == run.manifest.id
    assert {site.pass_ for site in report.sites} == {"free", "anchored"}
    assert report.coverage.unmatched == []
    free = sum(site.pass_ == "free" for site in report.sites)
    assert free == len(run.records)
    return report


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_repeated_run_is_identical(architecture, captured, replay):
    """Repeated on the machine that made it, a run is the same bit for bit in both passes."""
    run = captured(architecture)
    report = check(run, replay(run))
    if architecture == "bert":
        assert report.tokens is None
    else:
        assert (report.tokens.num_tokens, report.tokens.num_equal) == (4, 4)
        assert report.tokens.forced


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "tied"), HEADS)
def test_the_other_kind_of_head(architecture, tied, captured, replay):
    """Tied and untied output embeddings are both captured, and the head's logits with them."""
    run = captured(architecture, tied=tied)
    check(run, replay(run))
    assert "lm_head:out" in run.sites()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba", "qwen3-moe", "t5"])
def test_16_bit_models_repeat_themselves(architecture, dtype, captured, replay):
    """The narrow formats are recorded as they are and repeat too."""
    run = captured(architecture, dtype=dtype)
    check(run, replay(run))
    assert run.manifest.model.dtype == dtype
    assert dtype in {record.dtype for record in run.records}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_block_is_seen_in_every_forward(architecture, captured):
    """Input and output of each block, in execution order, once a forward."""
    run = captured(architecture)
    steps = range(1 if architecture == "bert" else 4)
    blocks = blocks_of(run)
    assert len(blocks) == (6 if architecture == "t5" else 3)
    for step in steps:
        records = [r for r in run.records if r.step == step]
        assert [r.order for r in records] == list(range(len(records)))
        seen = [r.site for r in records if module_of(r.site) in blocks]
        here = [b for b in blocks if not (step and b.startswith("encoder"))]
        assert [s for s in seen if s.endswith((":in", ":out"))] == [
            f"{block}:{port}" for block in here for port in ("in", "out")
        ]


@pytest.mark.parametrize("architecture", DECODERS)
def test_the_deciding_logits_are_recorded(architecture, captured):
    """The last position's logits of each step say which token was chosen."""
    run = captured(architecture)
    chosen = run.manifest.tokens.samples[0].chosen_ids
    for step, token in enumerate(chosen):
        logits = run.read(run.find(("free", 0, step, run.manifest.plan.logits_site)))
        assert logits.shape[:2] == (1, 1)
        assert int(logits[0, -1].argmax()) == token


def test_calls_with_a_word_are_named_by_it(captured):
    """Two rotary tables of one module keep their names whatever order they are asked for in."""
    sites = {s for s in captured("gemma3").sites() if s.startswith("model.rotary_emb")}
    assert {s.partition(":")[0] for s in sites} == {
        "model.rotary_emb#full_attention",
        "model.rotary_emb#sliding_attention",
    }


def test_a_second_call_in_a_forward_is_numbered(captured):
    """T5 uses one dropout at both ends of its stack: the later call is #2, in each forward
    anew."""
    run = captured("t5")
    first = [r.site for r in run.records if r.step == 0 and r.site.startswith("decoder.dropout")]
    later = [r.site for r in run.records if r.step == 1 and r.site.startswith("decoder.dropout")]
    assert [s for s in first if s.endswith(":out")] == [
        "decoder.dropout:out",
        "decoder.dropout#2:out",
    ]
    assert later == first


def test_routed_blocks_are_known(captured):
    """Blocks that choose experts are marked, because rounding may choose another."""
    for architecture, routed in (("mixtral", True), ("qwen3-moe", True), ("llama", False)):
        run = captured(architecture)
        notes = run.manifest.plan.modules
        assert {notes[block].routed for block in blocks_of(run)} == {routed}


def test_what_transformers_takes_for_a_causal_model_is():
    """The name alone tells it, also where it is of no usual form."""
    for name in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        config = PreTrainedConfig(architectures=[name])
        config.is_encoder_decoder = False
        assert resolve_task(config) == "causal-lm", name


SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
DECODED = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}
OWN = {
    "DPRContextEncoder": lambda: hf.DPRConfig(**SIZES, vocab_size=64),
    "BertForNextSentencePrediction": lambda: hf.BertConfig(**SIZES, vocab_size=64),
    "BartForSequenceClassification": lambda: hf.BartConfig(d_model=16, vocab_size=64, **DECODED),
    "T5EncoderModel": lambda: hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
}


@pytest.mark.parametrize("name", OWN)
def test_a_checkpoint_is_run_as_its_own_class(name, tmp_path):
    """The auto class of its task would leave the head out, or draw other weights at random."""
    torch.manual_seed(0)
    getattr(hf, name)(OWN[name]()).save_pretrained(tmp_path / "m")
    a = capture(tmp_path / "m", out=tmp_path / "a", prompts=[[5, 9, 17, 2]], probe=False)
    model = a.manifest.model
    assert (model.model_class, model.task, model.missing) == (name, "encoder", [])
    assert check(a, capture(like=a, out=tmp_path / "b", probe=False))


def test_a_panic_of_the_tokenizer_is_none(tiny_model, tmp_path, monkeypatch):
    """Rules in Rust that panic over a file raise what is no Exception."""

    class PanicException(BaseException):
        pass

    def panics(*_, **__):
        raise PanicException("called Option::unwrap() on a None value")

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", panics)
    with pytest.raises(PromptError, match="no usable tokenizer"):
        capture(tiny_model("llama"), out=tmp_path / "a", prompts=["what"], probe=False)
