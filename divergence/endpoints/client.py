"""Asking a server over HTTP: one question at a time, again where that may help.

The standard library's client is enough: JSON in, JSON out, one request a thread. What may pass is
asked again with growing pauses (429, 5xx, no connection, time-outs, an answer that was cut off);
what a server refuses (4xx) is not. A request has a deadline as a whole, so that a server which
sends a byte a second does not hold it for ever. Redirects are not followed: they would carry the
key to another host. The key comes from the environment (OPENAI_API_KEY), goes into one header, and
is cut out of every text of the server's before it is shown.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from divergence.errors import EndpointError, UsageError

__all__ = ["KEY_VARIABLE", "Client"]

KEY_VARIABLE = "OPENAI_API_KEY"
_AGAIN = (408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
_ATTEMPTS = 6
_MAX_BYTES = 1 << 28
_CHUNK = 1 << 16
_SHOWN = 300


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: the answer is then an error with the server's own code."""


class Client:
    """``base``: the address without ``/v1``. Safe to use from several threads."""

    def __init__(
        self, url: str, *, timeout_s: float = 600.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.base, self._timeout_s, self._sleep = _base(url), timeout_s, sleep
        self._key = os.environ.get(KEY_VARIABLE) or ""
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.num_retries = 0

    def get(self, path: str) -> Any:
        """The JSON there; None where there is none. Asked once: it asks what there is."""
        try:
            return self._once(path, None, timeout_s=10.0)
        except _Failed:
            return None

    def post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer, an object. Raises EndpointError: ``status`` is the server's code, or
        None."""
        for attempt in range(_ATTEMPTS):
            try:
                answer = self._once(path, payload, timeout_s=self._timeout_s)
                if isinstance(answer, dict):
                    return answer
                raise _Failed("the answer is JSON, but no object", status=None, again=True)
            except _Failed as failed:
                if not failed.again or attempt + 1 == _ATTEMPTS:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise EndpointError(
                        f"{path}: {failed.text}{tries}", status=failed.status, hint=failed.hint
                    ) from None
                self.num_retries += 1
                pause = min(30.0, 0.5 * 2**attempt) * (0.75 + random.random() / 2)
                self._sleep(min(60.0, failed.after) if failed.after is not None else pause)
        raise AssertionError("at least one attempt is made")

    def _once(self, path: str, payload: dict[str, Any] | None, *, timeout_s: float) -> Any:
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.base + path, data=body)
        request.add_header("Content-Type", "application/json")
        request.add_header("User-Agent", "divergence")
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        deadline = time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                data = _read(response, deadline)
        except urllib.error.HTTPError as error:
            raise self._refused(error, deadline) from None
        except (TimeoutError, urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            text = f"no answer within {timeout_s:g} s" if late else f"no connection: {reason}"
            if isinstance(error, http.client.HTTPException):
                text = "the answer was cut off"
            raise _Failed(self.clean(text), status=None, again=True) from None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            shown = self.clean(data[:80].decode(errors="replace"))
            text = f"the answer is no JSON, or was cut off: {shown!r}"
            raise _Failed(text, status=None, again=True) from None

    def _refused(self, error: urllib.error.HTTPError, deadline: float) -> _Failed:
        with error:
            try:
                text = _read(error, deadline)[: 4 * _SHOWN].decode(errors="replace")
            except (OSError, http.client.HTTPException, _Failed):
                text = ""
        hint = None
        if error.code in (401, 403):
            hint = f"the key is read from {KEY_VARIABLE}"
            text = ""  # some servers quote parts of it
        elif error.code in (301, 302, 303, 307, 308):
            hint = "redirects are not followed: give the address that it names"
        after = error.headers.get("Retry-After", "")
        return _Failed(
            f"{error.code} {error.reason}{': ' if text else ''}{self.clean(text)[:_SHOWN]}",
            status=error.code, again=error.code in _AGAIN, hint=hint,
            after=float(after) if after.isdecimal() else None,
        )  # fmt: skip

    def clean(self, text: str) -> str:
        """``text`` on one line and without the key."""
        text = " ".join(text.split())
        return text.replace(self._key, "***") if self._key else text


class _Failed(Exception):
    """One request that gave nothing. ``again``: it may, later."""

    def __init__(
        self, text: str, *, status: int | None, again: bool, hint: str | None = None,
        after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.text, self.status, self.again, self.hint, self.after = text, status, again, hint, after


def _read(response: Any, deadline: float) -> bytes:
    """All of it, before the deadline: a read waits for what is there, not for a whole chunk."""
    parts, size = [], 0
    while True:
        part = response.read1(_CHUNK)
        if not part:
            break
        size += len(part)
        if size > _MAX_BYTES:
            raise _Failed(f"the answer is longer than {_MAX_BYTES:,} bytes", status=None,
                          again=False, hint="ask for fewer --top-logprobs")  # fmt: skip
        if time.monotonic() > deadline:
            raise TimeoutError
        parts.append(part)
    data = b"".join(parts)
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and len(data) < int(length):
        raise http.client.IncompleteRead(data)
    return data


def _base(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--endpoint {url!r} is no address", hint="http://HOST:PORT, or with /v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "--endpoint is the server's address alone: no user, no password, no query",
            hint=f"a key is read from {KEY_VARIABLE}, and stands in no run and no command",
        )
    return url.rstrip("/").removesuffix("/v1")
