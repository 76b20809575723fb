"""A server that fails in all ways that servers do: nothing is lost, and each is named."""

import contextlib
import functools
import socket
import threading

import pytest

from divergence import Run, ServerOptions, capture, compare
from divergence.domains.logprobs.endpoints import capture as endpoint_capture
from divergence.domains.logprobs.endpoints.client import Client
from divergence.errors import DivergenceError, EndpointError, UsageError
from tests.domains.logprobs.endpoints import speakers

PROMPTS = [f"prompt number {n}" for n in range(10)]
FIRST = 1
"""Number of the first request behind the probe's."""


@pytest.fixture
def pauses(monkeypatch, stub):
    """Pauses between tries, which are not made; and a deadline that a test can wait for, of the
    requests that run into it."""
    found: list[float] = []

    class Asking(Client):
        def _once(self, path, payload, *, timeout_s):
            is_late = stub.troubles.get(stub.num) in ("late", "drip")
            return super()._once(path, payload, timeout_s=0.4 if is_late else timeout_s)

    client = functools.partial(Asking, sleep=found.append)
    monkeypatch.setattr(endpoint_capture, "Client", client)
    return found


GIVEN = {"prompts": PROMPTS, "max_new_tokens": 4, "concurrency": 1, "top_logprobs": 3}
pytestmark = pytest.mark.usefixtures("pauses")


@pytest.mark.parametrize("trouble", ["late", "429", "500", "503", "truncated", "cut off", "drip"])
def test_what_passes_is_asked_again(stub, serve, pauses, trouble):
    """Once, in the middle: the run is whole, and the pause was made."""
    whole = serve("whole")
    stub.num, stub.troubles = 0, {FIRST + 4: trouble}
    run = serve("a")
    assert len(pauses) == 1 and run.manifest.complete
    assert compare(whole, run).verdict.kind == "identical"


def test_pauses_grow_and_obey_the_server(stub, serve, pauses):
    """Retry-After is obeyed; else each pause is longer than the one before."""
    stub.troubles = {FIRST: "500", FIRST + 1: "truncated", FIRST + 2: "truncated"}
    serve("a")
    assert pauses[0] == 0  # Retry-After
    assert 0 < pauses[1] < pauses[2]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("no logprobs", "no log-probabilities, as others have"),
        ("probabilities", "is no log-probability"),
        ("other tokenizer", "the server read other tokens"),
        ("400", "400"),
    ],
)
def test_what_does_not_pass_is_named_and_asked_again_by_resume(
    stub, serve, tmp_path, trouble, said
):
    """One prompt of ten: named by an error, missing in an incomplete run, asked by --resume."""
    prompts = [[n, 2, 3] for n in range(10)]
    stub.troubles = {FIRST + 4: trouble}
    with pytest.raises(EndpointError, match=f"1 of 10 prompts.*prompt 4: .*{said}"):
        serve("a", prompts=prompts)
    run = Run.open(tmp_path / "a")
    assert not run.manifest.complete and "prompt 4" in run.manifest.stopped_by
    assert len(run.records) == 18
    before = stub.num
    stub.troubles = {}
    run = serve("a", prompts=prompts, resume=True)
    assert run.manifest.complete and len(run.records) == 20
    assert stub.num == before + 2  # the probe, and the one that lacked
    assert compare(run, serve("b", prompts=prompts)).verdict.kind == "identical"
    assert not run.path.with_name("a.resuming").exists()


def test_nan_is_kept_and_judged(stub, serve):
    """A nan of the server's is its answer, and a verdict of its own."""
    a = serve("a")
    stub.num, stub.troubles = 0, {FIRST + 4: "nan"}
    report = compare(a, serve("b"))
    assert (report.verdict.kind, report.verdict.side) == ("nonfinite", "candidate")


def test_a_server_that_is_gone_is_not_asked_for_ever(stub, serve):
    """After eight prompts in a row the others are left, and named."""
    stub.troubles = dict.fromkeys(range(FIRST + 6, FIRST + 5000), "400")
    with pytest.raises(EndpointError, match="94 of 100 prompts"):
        serve("a", prompts=[f"p {n}" for n in range(100)])
    assert len(stub.asked) < 50  # others may be on their way while the eighth is read


def test_an_interrupt_leaves_a_run_to_go_on_with(stub, serve, tmp_path):
    """Whatever stops a capture, what was answered is readable and not asked again."""

    def stop(event, done, total, text):
        if event == "endpoint" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve("a", progress=stop)
    run = Run.open(tmp_path / "a")
    assert run.manifest.stopped_by == "interrupted" and len(run.records) == 10
    stub.num = 0
    with pytest.raises(KeyboardInterrupt):
        serve("a", progress=lambda e, d, t, x: stop(e, d - 3, t, x), resume=True)
    assert len(Run.open(tmp_path / "a").records) == 16
    with pytest.raises(UsageError, match="begun otherwise: --max-new-tokens 4, now 5"):
        serve("a", resume=True, max_new_tokens=5)
    run = serve("a", resume=True)
    assert run.manifest.complete and len(run.records) == 20


def test_a_run_is_not_gone_on_with_on_another_server(stub, serve, monkeypatch):
    """Half of it from one version and half from another would be a run of neither."""
    stub.troubles = dict.fromkeys(range(8, 200), "400")
    with pytest.raises(EndpointError):
        serve("a")
    stub.troubles = {}
    monkeypatch.setitem(speakers.GET["vllm"], "/version", {"version": "0.1.stub"})
    with pytest.raises(UsageError, match=r"server vLLM 0\.0\.stub, now vLLM 0\.1\.stub"):
        serve("a", resume=True)
    monkeypatch.undo()
    assert serve("a", resume=True).manifest.complete


def test_prompts_without_an_answer_are_no_answers_that_end_earlier(stub, serve, tmp_path):
    """What the server refused is counted as missing, not as texts that ended."""
    a = serve("a")
    stub.num, stub.troubles = 0, dict.fromkeys(range(4, 200, 2), "400")
    with pytest.raises(EndpointError):
        serve("b")
    report = compare(a, Run.open(tmp_path / "b"))
    assert report.logprobs.num_ended == 0 and report.verdict.confidence != "high"


def test_the_key_is_in_no_error(stub, serve, monkeypatch):
    """Not even where the server quotes it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-key")
    stub.key = "sk-other"
    with pytest.raises(EndpointError) as failed:
        serve("a")
    assert "secret" not in str(failed.value) and "OPENAI_API_KEY" in str(failed.value)
    stub.key, stub.num = None, 0
    stub.troubles = dict.fromkeys(range(6), "echoes the key")
    with pytest.raises(EndpointError) as failed:
        serve("a")
    assert "secret" not in str(failed.value) and "***" in str(failed.value)


def test_the_key_is_in_nothing_that_is_recorded(stub, serve, monkeypatch):
    """A server that calls its model by the key it was sent; a placeholder is a word as any."""
    for key, recorded in (("sk-secret-key", "***"), ("EMPTY", "EMPTY")):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        stub.answers_as = key
        run = serve(key.lower())
        assert run.manifest.engine.facts["answers as"] == recorded
        assert "secret" not in (run.path / "manifest.json").read_text()


ENDLESS = {
    "headers": b"HTTP/1.1 200 OK\r\nX-Slow: ",
    "status": b"HTTP/1.1 200 ",
    "go on": b"HTTP/1.1 100 Continue\r\n\r\n",
    "a chunk's length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_a_server_that_never_comes_to_its_answer_is_given_up(name):
    """A byte now and then begins every time-out of the standard library anew; the deadline is of
    the request as a whole."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            while not over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.sendall(ENDLESS[name])
                        for _ in range(2000):
                            more = ENDLESS[name] if name == "go on" else b"0"
                            connection.sendall(more)
                            if over.wait(0.02):
                                break

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client = Client(url, timeout_s=0.3, sleep=lambda _: None)
        with pytest.raises(EndpointError, match=r"no answer within 0\.3 s \(6 tries\)"):
            client.post("/v1/completions", {})
        over.set()
    thread.join(10)


BEYOND = {
    "an id beyond 64 bits": ("tokens", [f"token_id:{2**63}", "token_id:1"]),
    "an id of 5,000 digits": ("tokens", ["token_id:" + "9" * 5000, "token_id:1"]),
    "an id of other digits": ("tokens", ["token_id:\u0663", "token_id:\u00b2"]),
    "a negative id": ("tokens", ["token_id:-1", "token_id:1"]),
    "a number beyond all floats": ("token_logprobs", ["9" * 5000, -1.0]),
    "more tokens than were asked for": ("tokens", ["token_id:1"] * 1000),
}


@pytest.mark.parametrize("name", BEYOND)
def test_numbers_that_no_server_means_break_nothing(stub, serve, name):
    """Each is refused by name or taken for what is not told: never a fault of the tool."""
    field, values = BEYOND[name]
    stub.change = lambda answer: answer["choices"][0]["logprobs"].update({field: values})
    stub.lacks = {"ids", "prompt_logprobs"}
    with contextlib.suppress(DivergenceError):
        serve("a", prompts=PROMPTS[:2])


def test_redirects_are_not_followed(stub, serve):
    """A key is sent to nobody else."""
    stub.troubles = dict.fromkeys(range(6), "elsewhere")
    with pytest.raises(EndpointError, match="307"):
        serve("a")


@pytest.mark.slow
def test_many_at_a_time(stub, serve):
    """In whatever order answers come, each is its own prompt's."""
    one = serve("one")
    stub.num, stub.troubles = 0, {FIRST + 1: "slow", FIRST + 3: "503"}
    many = serve("many", concurrency=5)
    assert compare(one, many).verdict.kind == "identical"
    assert threading.active_count() < 40


def test_no_server(serve, stub, tmp_path, pauses):
    """Where nobody listens that is said, and nothing is written."""
    with pytest.raises(EndpointError, match="no connection"):
        capture("tiny", server=ServerOptions(endpoint="http://127.0.0.1:9"), out=tmp_path / "z")
    assert not (tmp_path / "z").exists()


def test_a_prompt_that_another_model_answered_is_named(stub, serve):
    """A gateway that falls back: such an answer is none of the model's."""
    stub.answers_as, stub.troubles = "tiny", {FIRST + 4: "other model"}
    with pytest.raises(EndpointError, match=r"prompt 4: fallback answered, others .* by tiny"):
        serve("a")


def test_who_answers_in_place_of_the_model_that_was_asked_is_said(stub, serve):
    """By the capability probe's answer; a server that names the model asked for, or none, is
    silent."""
    silent = serve("a")
    stub.answers_as = "tiny"
    assert not any("answers as" in note for note in compare(silent, serve("b")).notes)
    stub.answers_as = "tiny-2026-01"
    other = serve("c")
    assert "B: tiny was asked for, and the server answers as tiny-2026-01" in (
        compare(silent, other).notes
    )


def test_what_another_model_answers_is_not_added_to_a_run(stub, serve):
    """``--resume`` behind a gateway that has fallen back meanwhile."""
    stub.answers_as, stub.troubles = "tiny", {FIRST + 4: "400"}
    with pytest.raises(EndpointError):
        serve("a")
    stub.answers_as, stub.troubles = "fallback", {}
    with pytest.raises(UsageError, match="answered by the model asked for, now fallback"):
        serve("a", resume=True)
