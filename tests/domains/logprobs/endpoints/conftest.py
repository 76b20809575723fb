"""A server on loopback that speaks OpenAI's completions as vLLM does, well or badly; or as another
server does (speakers.py)."""

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from divergence import ServerOptions, capture
from tests.domains.logprobs.endpoints import speakers

VOCABULARY = 40


def token_text(number: int) -> str:
    return f"<{number}>"


class Stub:
    """``model``: (ids) → log-probabilities of the next token. The rest: how it behaves.

    ``troubles``: by the number of a request to the completions route (the probe's are 0 and, where
    prompts are not scored, 1), what goes wrong. ``shorter``: tokens by which every second answer
    is shorter. ``change``: of each answer, before it is sent. ``machine``: another one draws others
    with the same seed.
    """

    def __init__(self) -> None:
        self.noise = 0.0
        self.lacks: set[str] = set()
        self.troubles: dict[int, str] = {}
        self.weights = 0
        self.template = 0
        self.samples = False
        self.most_top = 20
        self.key: str | None = None
        self.answers_as = ""
        self.change: Callable[[dict], object] | None = None
        self.speaks = "vllm"
        self.shorter = 0
        self.machine = 0
        self.asked: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.num = 0

    def logits(self, ids: list[int]) -> list[float]:
        generator = random.Random(repr((ids[-3:], self.weights)))
        values = [generator.gauss(0, 2) for _ in range(VOCABULARY)]
        noise = random.Random(repr((ids, "noise")))
        values = [value + noise.gauss(0, self.noise) for value in values]
        whole = math.log(sum(map(math.exp, values)))
        return [value - whole for value in values]

    def top(self, row: list[float], count: int, own: int) -> dict[str, dict]:
        order = sorted(range(VOCABULARY), key=lambda n: -row[n])
        ids = [own, *(n for n in order[:count] if n != own)]
        return {str(n): {"logprob": row[n], "rank": order.index(n) + 1} for n in ids}

    def read(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt, as the server renders it."""
        ids = [ord(char) % VOCABULARY for char in prompt] if isinstance(prompt, str) else prompt
        return [*[1] * self.template, *ids]

    def go_on(
        self, ids: list[int], count: int, seed: int | None = None
    ) -> tuple[list[int], list[list[float]]]:
        """An answer's tokens, and the distribution at each; drawn with ``seed``."""
        whole, rows = list(ids), []
        drawing = random.Random(repr((ids, seed, self.machine)))
        if count > 1 and sum(ids) % 2:
            count -= self.shorter
        for _ in range(count):
            row = self.logits(whole)
            token = max(range(VOCABULARY), key=lambda n: row[n])
            if seed is not None:
                token = drawing.choices(range(VOCABULARY), map(math.exp, row))[0]
            if self.samples:
                token = random.Random(repr(whole)).choices(range(VOCABULARY), map(math.exp, row))[0]
            rows.append(row)
            whole.append(token)
        return whole[len(ids) :], rows

    def completions(self, body: dict) -> dict:
        ids = self.read(body["prompt"])
        count = body.get("logprobs")
        if count is not None and count > self.most_top:
            raise ValueError(f"logprobs must be at most {self.most_top}")
        seed = body["seed"] if body["temperature"] else None
        tokens, rows = self.go_on(ids, body["max_tokens"], seed)
        named = body.get("return_tokens_as_token_ids") and "ids" not in self.lacks
        name = (lambda n: f"token_id:{n}") if named else token_text
        choice: dict = {"text": "".join(map(token_text, tokens)), "finish_reason": "length"}
        if count is not None and "logprobs" not in self.lacks:
            choice["logprobs"] = {
                "tokens": [name(n) for n in tokens],
                "token_logprobs": [row[n] for row, n in zip(rows, tokens, strict=True)],
                "top_logprobs": [
                    {name(int(n)): one["logprob"] for n, one in self.top(row, count, own).items()}
                    for row, own in zip(rows, tokens, strict=True)
                ],
            }
        if "prompt_logprobs" in body and "prompt_logprobs" not in self.lacks:
            choice["prompt_logprobs"] = [None] + [
                self.top(self.logits(ids[:n]), body["prompt_logprobs"], ids[n])
                for n in range(1, len(ids))
            ]
        if body.get("return_token_ids") and "ids" not in self.lacks:
            choice |= {"token_ids": tokens, "prompt_token_ids": ids}
        usage = {} if "usage" in self.lacks else {"usage": {"prompt_tokens": len(ids)}}
        return {"choices": [choice], **usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Nothing."""

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        stub: Stub = self.server.stub
        said = speakers.GET[stub.speaks].get(self.path)
        if said is None or "models" in stub.lacks:
            return self._send(404, b"{}")
        self._send(200, json.dumps(said).encode())

    def do_POST(self) -> None:
        stub: Stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            number, stub.num = stub.num, stub.num + 1
            stub.asked.append(body)
            stub.headers.append(dict(self.headers))
        trouble = stub.troubles.get(number, "")
        if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
            said = f"Incorrect API key provided: {self.headers.get('Authorization')}"
            return self._send(401, said.encode())
        if trouble.isdecimal():
            return self._send(int(trouble), b"no", Retry_After="0")
        if trouble == "slow":
            time.sleep(0.5)
        if trouble == "late":
            self.rfile.read(1)  # until the client gives up
        if trouble == "echoes the key":
            return self._send(500, str(self.headers.get("Authorization")).encode())
        if trouble == "elsewhere":
            return self._send(307, b"", Location="http://127.0.0.1:9/v1/completions")
        try:
            answer = speakers.POST[stub.speaks].get(self.path)
            if answer is None:
                return self._send(404, b"{}")
            found = answer(stub, body)
        except ValueError as error:
            return self._send(400, str(error).encode())
        if trouble == "no logprobs":
            found["choices"][0].pop("logprobs", None)
        if trouble == "nan":
            found["choices"][0]["logprobs"]["token_logprobs"][1] = math.nan
        if trouble == "probabilities":
            found["choices"][0]["logprobs"]["token_logprobs"][1] = 0.7
        if trouble == "other tokenizer":
            found["choices"][0]["prompt_token_ids"] = [3, 3, 3]
        if stub.change is not None:
            stub.change(found)
        if stub.answers_as or trouble == "other model":
            found["model"] = "fallback" if trouble == "other model" else stub.answers_as
        data = json.dumps(found).encode()
        if trouble == "truncated":
            return self._send(200, data[: len(data) // 2])
        if trouble == "cut off":
            self.close_connection = True
            return self._send(200, data[: len(data) // 2], length=str(len(data)))
        if trouble == "drip":
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            for n in range(len(data)):
                self.wfile.write(data[n : n + 1])
                self.wfile.flush()
                time.sleep(0.05)
            return None
        self._send(200, data)


@contextlib.contextmanager
def serving() -> Iterator[Stub]:
    """A server that runs meanwhile, at its ``url``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that went away
    server.stub = found = Stub()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def stub():
    """A server that runs while the test does."""
    with serving() as found:
        yield found


@pytest.fixture
def serve(stub, tmp_path, request):
    """``serve(name, **options)``: a capture of the server, with the options ``GIVEN`` of the test's
    file; of another run's prompts where it is ``like`` one."""

    def run(name="a", **options):
        given = request.module.GIVEN | options
        if "like" in given:
            del given["prompts"]
        server = ServerOptions(endpoint=stub.url)
        return capture("tiny", server=server, out=tmp_path / name, **given)

    return run
