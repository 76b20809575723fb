"""Ten thousand prompts from a server that fails: nothing lost, and what it costs.

    python benchmarks/endpoint_many.py [--prompts N]        # a minute or two

A server on loopback answers made-up log-probabilities, eight tokens of eleven entries each. One
request in twenty fails: 429, 500, a cut answer, a dropped connection. Printed: seconds, requests a
second, tries again, prompts without an answer, megabytes of the run, peak memory, and the seconds
in which the run is opened and compared with itself. Then the capture is interrupted half way, and
goes on with --resume: how many prompts are asked for twice.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from divergence import Run, ServerOptions, capture, compare
from divergence.domains.logprobs.endpoints import client as client_module

NUM_TOKENS, TOP, FAILS = 8, 10, 0.05


class Handler(BaseHTTPRequestHandler):
    """vLLM's completions."""

    protocol_version = "HTTP/1.1"
    num_answers = 0
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _send(self, status: int, data: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        said = {
            "/v1/models": {"data": [{"id": "made-up", "owned_by": "vllm"}]},
            "/version": {"version": "0"},
        }.get(self.path)
        self._send(200 if said else 404, json.dumps(said or {}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = json.dumps(_answer(body)).encode()
        trouble = random.random() / FAILS
        if trouble < 0.5:
            return self._send(random.choice((429, 500)), b"no")
        if trouble < 1:
            self.close_connection = True
            return self._send(200, data[: len(data) // 2], len(data) if trouble < 0.75 else None)
        with Handler.lock:
            Handler.num_answers += 1
        self._send(200, data)


def _answer(body: dict) -> dict:
    generator = random.Random(body["prompt"] if isinstance(body["prompt"], str) else 0)
    tokens, rows = [], []
    for _ in range(body["max_tokens"]):
        values = sorted((generator.gauss(0, 2) for _ in range(TOP)), reverse=True)
        whole = math.log(sum(map(math.exp, values)) * 1.1)
        ids = generator.sample(range(50_000), TOP)
        tokens.append(ids[0])
        rows.append({f"token_id:{n}": value - whole for n, value in zip(ids, values, strict=True)})
    logprobs = {
        "tokens": [f"token_id:{n}" for n in tokens],
        "top_logprobs": rows,
        "token_logprobs": [max(row.values()) for row in rows],
    }
    choice = {"text": "", "logprobs": logprobs, "token_ids": tokens, "prompt_token_ids": [1, 2, 3]}
    return {"choices": [choice], "usage": {"prompt_tokens": 3}}


def main(num: int) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    prompts = [f"prompt number {n}" for n in range(num)]
    given = {
        "prompts": prompts,
        "max_new_tokens": NUM_TOKENS,
        "top_logprobs": TOP,
        "concurrency": 16,
    }
    clients: list[client_module.Client] = []
    from divergence.domains.logprobs.endpoints import capture as module

    class Counted(client_module.Client):
        def __init__(self, url: str) -> None:
            super().__init__(url, sleep=lambda seconds: time.sleep(seconds / 100))
            clients.append(self)

    module.Client = Counted  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        began = time.perf_counter()
        run = capture(None, server=ServerOptions(endpoint=url), out=folder / "a", **given)
        seconds = time.perf_counter() - began
        without = sum(not one.generated_ids for one in run.manifest.tokens.samples)
        size = sum(one.stat().st_size for one in run.path.rglob("*") if one.is_file()) / 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began = time.perf_counter()
        report = compare(Run.open(run.path), run.path)
        again = time.perf_counter() - began
        assert report.logprobs is not None and report.logprobs.num_tokens == num * NUM_TOKENS
        Handler.num_answers = 0
        stopped = _interrupted(folder / "b", url, given, num // 2)
        resumed = capture(
            None, server=ServerOptions(endpoint=url, resume=True), out=folder / "b", **given
        )
        twice = Handler.num_answers - num
        assert resumed.manifest.complete
    print(
        "| prompts | seconds | a second | tried again | without an answer | MB | peak MiB | "
        "open and compare, s | interrupted at | asked twice |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {num:,} | {seconds:.0f} | {num / seconds:.0f} | {clients[0].num_retries:,} | "
        f"{without} | {size:.0f} | {peak:.0f} | {again:.1f} | {stopped:,} | {twice} |"
    )


def _interrupted(out: Path, url: str, given: dict, at: int) -> int:
    """Ctrl-C behind ``at`` answers."""
    seen = 0

    def stop(event: str, done: int, total: int | None, text: str) -> None:
        nonlocal seen
        seen = done if event == "endpoint" else seen
        if event == "endpoint" and done >= at:
            raise KeyboardInterrupt

    try:
        capture(None, server=ServerOptions(endpoint=url), out=out, progress=stop, **given)
    except KeyboardInterrupt:
        return seen
    raise AssertionError("it was not interrupted")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=10_000)
    main(parser.parse_args().prompts)
