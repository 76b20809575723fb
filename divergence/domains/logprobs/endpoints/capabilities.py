"""The capabilities of a server, found by asking it, and what can be concluded from them.

The kind of server comes from what it says of itself (``/v1/models``, ``/version``, ``/props`` ...);
what it gives from one answer of one token to the first prompt. What it refuses is asked for less.

Where answers do not tell how the server reads a prompt, a route may:

    vLLM, SGLang   POST /tokenize          {prompt} or {messages} -> {tokens: [id]}
    llama.cpp      POST /apply-template    {messages} -> {prompt}
                   POST /tokenize          {content, add_special, parse_special} -> {tokens: [id]}
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from divergence.domains.logprobs.endpoints.client import Client
from divergence.domains.logprobs.endpoints.protocols import PROTOCOLS, Question
from divergence.errors import EndpointError, UsageError
from divergence.facts import Fact, fact, sentence
from divergence.run.manifest import UNKNOWN
from divergence.run.scores import BY_TEXT

Route = Literal["llama.cpp", "prompt"]

STEPS = "token by token"
"""How an answer is scored where prompts are not: each of its tokens is asked for alone."""

_REFUSED = (400, 404, 405, 415, 422, 501)
_NATIVE = {"sglang": "sglang", "llama.cpp": "llama.cpp", "TGI": "tgi"}
_OWNERS = {"vllm": "vLLM", "sglang": "sglang", "llamacpp": "llama.cpp", "MindIE Server": "MindIE"}
_ROUTES = (
    ("vLLM", "/version", "version", ""),
    ("sglang", "/get_server_info", "version", "dtype"),
    ("llama.cpp", "/props", "build_info", ""),
    ("TGI", "/info", "version", "model_dtype"),
)
"""Kind, where it says so of itself, and by which fields its version and its dtype."""
_DTYPES = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Holds what a server says of itself."""

    kind: str = UNKNOWN
    version: str = UNKNOWN
    dtype: str | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """``forces``: how a recorded answer is scored, or None. ``tokenizes``: the route that tells a
    prompt's tokens, where answers do not."""

    server: Server
    model: str
    protocol: str
    extras: frozenset[str] = frozenset()
    logprobs: bool = False
    num_top: int = 0
    token_ids: bool = False
    prompt_ids: bool = False
    counts: bool = False
    forces: str | None = None
    tokenizes: Route | None = None
    answers_as: str | None = None
    """The model that an answer names, which behind a gateway may not be the one asked for."""
    lacks: tuple[Fact, ...] = field(default=())

    @property
    def facts(self) -> dict[str, str]:
        """Return facts for the manifest."""
        return {
            "protocol": self.protocol,
            "token ids": "told" if self.token_ids else BY_TEXT,
            "top-k": str(self.num_top),
            "prompts scored": self.forces or "no",
            **({} if self.logprobs else {"units": "characters"}),
            **({"answers as": self.answers_as} if self._is_other else {}),
            **({"lacks": "; ".join(map(sentence, self.lacks))} if self.lacks else {}),
        }

    @property
    def _is_other(self) -> bool:
        return self.answers_as not in (None, self.model)

    @property
    def given(self) -> Fact:
        """Return what it gives, before anything is captured."""
        gives = [
            fact("endpoints.logprobs", num_top=self.num_top) if self.logprobs else None,
            fact("endpoints.token_ids") if self.token_ids else None,
            fact("endpoints.prompt_ids") if self.prompt_ids else None,
            fact("endpoints.scores") if self.forces not in (None, STEPS) else None,
        ]
        return fact(
            "endpoints.server",
            kind=self.server.kind,
            version=self.server.version,
            protocol=self.protocol,
            answers_as=self.answers_as if self._is_other else None,
            gives=[item for item in gives if item is not None] or [fact("endpoints.text")],
        )


def find_server(client: Client) -> Server:
    """Its kind, as far as it tells. Raises nothing: a server may tell nothing."""
    listed = client.get("/v1/models")
    listed = listed.get("data") if isinstance(listed, dict) else None
    listed = listed if isinstance(listed, list) else []
    models = [entry for entry in listed if isinstance(entry, dict)]
    names = tuple(str(entry["id"]) for entry in models if "id" in entry)
    owner = str(models[0].get("owned_by", "")) if models else ""
    kind = _OWNERS.get(owner, UNKNOWN)
    for asked, path, version, dtype in _ROUTES:
        answer = client.get(path) if kind in (asked, UNKNOWN) else None
        if isinstance(answer, dict) and (number := _text(answer, version)):
            form = (_text(answer, dtype) or "").removeprefix("torch.")
            return Server(
                kind=asked,
                version=number,
                dtype=form if form in _DTYPES else None,
                models=names or tuple(filter(None, [_text(answer, "model_id")])),
            )
    return Server(kind=kind, models=names)


def probe(
    client: Client, server: Server, model: str | None, question: Question, *, chat: bool
) -> Capabilities:
    """Asks for one token of the answer to ``question``. Raises EndpointError where no form of it is
    taken, and UsageError where no model is named."""
    if model is None:
        if len(server.models) != 1:
            listed = ", ".join(server.models[:8])
            raise UsageError(
                f"the server has {len(server.models)} models: {listed}"
                if listed
                else "the server names no model",
                hint="--model NAME",
            )
        model = server.models[0]
    name = "chat" if chat else _NATIVE.get(server.kind, "completions")
    protocol = PROTOCOLS[name]
    if question.ids is not None and not protocol.takes_ids:
        raise UsageError(f"the {name} protocol takes no token ids", hint="give prompts as text")
    question = dataclasses.replace(question, model=model, num_tokens=1)
    # the most that the server takes
    refused: EndpointError | None = None
    for extras in protocol.levels:
        asked = dataclasses.replace(question, extras=extras)
        try:
            answer = protocol.answer(client.post(protocol.path, protocol.request(asked)))
            break
        except EndpointError as error:
            if error.status not in _REFUSED:
                raise
            refused = refused or error
    else:
        assert refused is not None
        raise refused
    tells_prompt = answer.prompt_ids is not None
    form: Route = "llama.cpp" if server.kind == "llama.cpp" else "prompt"
    route = (
        form if not (tells_prompt or question.ids) and tokens_of(client, form, question) else None
    )
    forces = STEPS if protocol.takes_ids and answer.has_ids and answer.num_top else None
    if answer.scores_prompt and protocol.takes_ids:
        forces = protocol.forces_by or "always"
    elif name == "completions":  # does it echo a prompt with its scores?
        asked = dataclasses.replace(question, extras=frozenset(("echo", "few_logprobs")))
        with contextlib.suppress(EndpointError):
            echoed = protocol.answer(client.post(protocol.path, protocol.request(asked))).tokens
            if len(echoed) > 1 and sum(token.logprob is not None for token in echoed) > 1:
                forces = "echo"
    caps = Capabilities(
        server=server,
        model=model,
        protocol=name,
        extras=extras,
        logprobs=answer.has_logprobs,
        num_top=answer.num_top,
        token_ids=answer.has_ids,
        tokenizes=route,
        prompt_ids=tells_prompt or question.ids is not None or route is not None,
        counts=answer.num_prompt is not None,
        answers_as=answer.model,
        forces=forces,
    )
    return dataclasses.replace(caps, lacks=_lacks(caps))


def _lacks(caps: Capabilities) -> tuple[Fact, ...]:
    lacks = []
    if not caps.logprobs:
        lacks.append(fact("endpoints.no_logprobs"))
    elif not caps.num_top:
        lacks.append(fact("endpoints.no_likeliest"))
    if not caps.token_ids:
        lacks.append(fact("endpoints.no_token_ids"))
    if not caps.prompt_ids:
        number = fact("endpoints.only_number_of_prompt")
        lacks.append(number if caps.counts else fact("endpoints.no_prompt_ids"))
    if caps.forces == STEPS:
        lacks.append(fact("endpoints.scores_by_steps"))
    elif not caps.forces:
        lacks.append(fact("endpoints.no_scores"))
    return tuple(lacks)


def _text(fields: dict[str, Any], key: str) -> str | None:
    text = fields.get(key)
    return text[:100] if isinstance(text, str) and text else None


def tokens_of(client: Client, route: Route, question: Question) -> list[int] | None:
    """The prompt's token ids; None where the server has no such route."""
    text: Any = question.text or ""
    messages = [dict(message) for message in question.messages or ()]
    try:
        if route == "prompt":
            asked = {"messages": messages} if messages else {"prompt": text}
            body = {"model": question.model, **asked}
        else:
            if messages:
                text = client.post("/apply-template", {"messages": messages}).get("prompt")
            body = {"content": text, "add_special": True, "parse_special": True}
        ids = client.post("/tokenize", body).get("tokens")
    except EndpointError:
        return None
    if not isinstance(ids, list) or not ids:
        return None
    return ids if all(type(token_id) is int and token_id >= 0 for token_id in ids) else None
