"""The options of ``capture`` for a server: ``capture --endpoint URL``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from divergence.options.option import Options, option

_server = partial(option, panel="A server in place of a model", late=1)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Says what ``capture`` asks of a server, in place of running a model."""

    endpoint: str | None = _server(
        "--endpoint URL",
        "A server to ask in place of running a model: the log-probabilities of its answers. "
        "A key is read from OPENAI_API_KEY.",
    )
    top_logprobs: int = _server(
        "--top-logprobs N", "Likeliest tokens a server is asked for at each.", default=20
    )
    answers: int = _server(
        "--answers N", "Draw N answers to each prompt; 0: the greedy one alone.", default=0
    )
    concurrency: int = _server(
        "--concurrency N", "Prompts that a server is asked at a time.", minimum=1, default=4
    )
    resume: bool = _server(
        "--resume",
        "Go on with an interrupted capture of a server: ask what it lacks.",
        default=False,
    )
