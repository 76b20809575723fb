"""Routes by which a server tells how it reads a prompt, where its answers do not.

vLLM, SGLang   POST /tokenize          {prompt} or {messages} -> {tokens: [id]}
llama.cpp      POST /apply-template    {messages} -> {prompt}
               POST /tokenize          {content, add_special, parse_special} -> {tokens: [id]}
"""

from __future__ import annotations

from typing import Any, Literal

from divergence.endpoints.client import Client
from divergence.endpoints.protocols import Question
from divergence.errors import EndpointError

__all__ = ["Route", "route_of", "tokens_of"]

Route = Literal["llama.cpp", "prompt"]


def route_of(client: Client, kind: str, question: Question) -> Route | None:
    """The form that the server takes, found by asking it."""
    form: Route = "llama.cpp" if kind == "llama.cpp" else "prompt"
    return form if tokens_of(client, form, question) else None


def tokens_of(client: Client, route: Route, question: Question) -> list[int] | None:
    """The prompt's token ids; None where the server has no such route."""
    try:
        answer = client.post("/tokenize", _body(client, route, question))
    except EndpointError:
        return None
    ids = answer.get("tokens")
    if not isinstance(ids, list) or not ids:
        return None
    return ids if all(type(one) is int and one >= 0 for one in ids) else None


def _body(client: Client, route: Route, question: Question) -> dict[str, Any]:
    """Raises EndpointError where the conversation cannot be rendered."""
    messages = None if question.messages is None else [dict(one) for one in question.messages]
    if route == "prompt":
        asked = {"messages": messages} if messages else {"prompt": question.text or ""}
        return {"model": question.model, **asked}
    text: Any = question.text or ""
    if messages:
        text = client.post("/apply-template", {"messages": messages}).get("prompt")
    return {"content": text, "add_special": True, "parse_special": True}
