"""Servers that speak otherwise than vLLM: what each gives, and that the verdicts are the same."""

import pytest

from divergence import compare

PROMPTS = [f"prompt number {n}" for n in range(10)]

GIVES = {
    # speaks: (name, dtype, token ids, the prompt's ids, how an answer is scored)
    "vllm": ("vLLM 0.0.stub", None, "told", True, "prompt_logprobs"),
    "sglang": ("sglang 0.5.3", "bfloat16", "told", True, "always"),
    "llama.cpp": ("llama.cpp b6000-abc", None, "told", True, "token by token"),
    "tgi": ("TGI 3.3.4", "float16", "told", True, "no"),
    "openai": ("unknown unknown", None, "numbered by text", False, "echo"),
    "mindie": ("MindIE unknown", None, "numbered by text", False, "echo"),
}
GIVEN = {"prompts": PROMPTS, "max_new_tokens": 6}


@pytest.mark.parametrize("speaks", GIVES)
def test_what_each_server_gives(stub, serve, speaks):
    """The capability probe's answer stands in the run; numbers are those of the model."""
    stub.speaks = speaks
    name, dtype, ids, prompts, scored = GIVES[speaks]
    run = serve("a", top_logprobs=4)
    facts = run.manifest.engine.facts
    assert (run.manifest.engine.version, run.manifest.settings.dtype) == (name, dtype)
    assert (facts["token ids"], facts["prompts scored"]) == (ids, scored)
    sample = run.manifest.tokens.samples[2]
    assert (sample.prompt_ids == stub.read(PROMPTS[2])) is prompts
    assert facts["prompt tokens"].split()[2] == str(len(PROMPTS[2]))
    values = run.read(run.find(("free", 2, 0, "logprobs:out")))
    answer, rows = stub.go_on(stub.read(PROMPTS[2]), 6)
    expected = [row[token] for row, token in zip(rows, answer, strict=True)]
    assert values[0, -6:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert values.shape[2] >= 5 and facts["top-k"] == "4"


@pytest.mark.parametrize("speaks", GIVES)
def test_the_same_model_is_identical_and_another_is_not(stub, serve, speaks):
    """Whatever the server speaks, equal weights agree and others do not."""
    stub.speaks = speaks
    a = serve("a")
    assert compare(a, serve("b")).verdict.kind == "identical"
    stub.weights = 1
    report = compare(a, serve("c"))
    assert report.verdict.kind in ("systematic", "drift", "undetermined"), report.verdict
    assert report.logprobs.num_equal < 20


@pytest.mark.parametrize("speaks", GIVES)
def test_another_template_stops(stub, serve, speaks):
    """Prompts that another template rendered are another experiment."""
    stub.speaks = speaks
    a = serve("a")
    stub.template = 1
    report = compare(a, serve("b"))
    assert report.verdict.kind == "incomparable" and "template" in report.verdict.summary


@pytest.mark.slow
@pytest.mark.parametrize("speaks", ["sglang", "llama.cpp", "openai"])
def test_recorded_answers_are_scored(stub, serve, speaks):
    """By the server's own scores of prompts, or token by token; every token is compared."""
    a = serve("a")
    stub.speaks, stub.noise = speaks, 0.02
    b = serve("b", like=a)
    assert b.manifest.engine.facts["tokens"] == "given"
    report = compare(a, b)
    assert (report.verdict.kind, report.logprobs.num_equal) == ("within_floor", 60)
    assert report.logprobs.delta.num_tokens >= 60
    stub.weights, stub.noise = 1, 0.0
    report = compare(a, serve("c", like=a))
    assert (report.verdict.kind, report.logprobs.pattern) == ("systematic", "shifted")


def test_a_token_that_is_on_no_list_is_not_scored(stub, serve):
    """Asked token by token, its log-probability stays unknown: it is never guessed."""
    a = serve("a")
    stub.speaks, stub.weights = "llama.cpp", 1
    report = compare(a, serve("b", like=a, top_logprobs=2))
    assert 0 < report.logprobs.delta.num_tokens < 60 and report.logprobs.num_other > 0


@pytest.mark.slow
@pytest.mark.parametrize("speaks", ["vllm", "openai", "llama.cpp", "sglang"])
def test_conversations(stub, serve, speaks):
    """--chat: the server's own template; where its answers do not tell what it made of a prompt,
    its tokenize route does."""
    stub.speaks = speaks
    if speaks != "vllm":
        stub.lacks = {"ids"}
    a = serve("a", chat=True)
    assert a.manifest.engine.facts["protocol"] == "chat"
    assert compare(a, serve("b", chat=True)).verdict.kind == "identical"
    stub.template = 1
    report = compare(a, serve("c", chat=True))
    assert report.verdict.kind == "incomparable" and "template" in report.verdict.summary


def test_a_route_tells_what_answers_do_not(stub, serve):
    """The same number of tokens, and other ones: seen by the tokenize route alone."""
    stub.lacks = {"ids", "prompt_logprobs"}
    a, before = serve("a"), stub.read
    assert a.manifest.tokens.samples[0].prompt_ids == []  # tokens go by text: ids stay out
    stub.speaks = "llama.cpp"
    c = serve("c")
    stub.read = lambda prompt: [5, *before(prompt)[1:]]
    report = compare(c, serve("d"))
    assert (
        report.verdict.kind == "incomparable" and "differs from token 0" in report.verdict.summary
    )


@pytest.mark.slow
def test_an_answer_that_ends_earlier_is_a_difference(stub, serve):
    """A flip whose margin nobody told; but not where both were to answer so many tokens."""
    a = serve("a")
    report = compare(a, serve("b", max_new_tokens=4))
    assert (report.verdict.kind, report.logprobs.num_ended) == ("identical", 0)
    stub.shorter = 2
    report = compare(a, serve("c"))
    assert (report.verdict.kind, report.verdict.confidence) == ("within_floor", "low")
    assert 0 < report.logprobs.num_ended < 10
    assert "end earlier on B, by 2 tokens each" in report.verdict.summary
