"""Asking a server over HTTP: one question at a time, again where that may help.

The standard library's client is enough: JSON in, JSON out, one request a thread. What may pass is
asked again with growing pauses (429, 5xx, no connection, time-outs, an answer that was cut off);
what a server refuses (4xx) is not. A request has a deadline as a whole, so that a server which
sends a byte a second does not hold it for ever. Redirects are not followed: they would carry the
key to another host. The key comes from the environment (OPENAI_API_KEY), goes into one header, and
is cut out of every text of the server's before it is shown.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from divergence.errors import EndpointError, UsageError
from divergence.outside import json_value

KEY_VARIABLE = "OPENAI_API_KEY"
_AGAIN = (408, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
_ATTEMPTS = 6
_MAX_BYTES = 1 << 28
_MAX_TOLD_BYTES = 1 << 24
"""Of what a server says of itself."""
_CHUNK = 1 << 16
_SHOWN = 300
_SECRET = 8
"""Letters of the shortest key that is one."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None: the answer is then an error with the server's own code."""


class _Request(urllib.request.Request):
    """A request with a deadline as a whole, name look-up apart: its connection is broken then,
    wherever it stands. A time-out of the standard library's begins anew with each byte."""

    def __init__(self, url: str, body: bytes | None, timeout_s: float) -> None:
        super().__init__(url, data=body)
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._break)
        self._timer.daemon = True
        self._end = time.monotonic() + timeout_s

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()
            for socket_ in self._sockets:
                socket_.close()

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._end

    def watch(self, kind: Callable[..., http.client.HTTPConnection]) -> Callable[..., Any]:
        """``kind`` of connections, of which the sockets are known here: a second handle of each,
        since TLS takes the first one over."""

        def connect(*args: Any, **options: Any) -> socket.socket:
            made = socket.create_connection(*args, **options)
            self._sockets.append(made.dup())
            return made

        def make(*args: Any, **options: Any) -> http.client.HTTPConnection:
            connection = kind(*args, **options)
            connection._create_connection = connect  # type: ignore[attr-defined]  # no public hook
            return connection

        return make

    def _break(self) -> None:
        for socket_ in self._sockets:
            with contextlib.suppress(OSError):
                socket_.shutdown(socket.SHUT_RDWR)


class _Watched(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(request.watch(http.client.HTTPConnection), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(request.watch(http.client.HTTPSConnection), request)


class Client:
    """``base``: the address without ``/v1``. Safe to use from several threads."""

    def __init__(
        self, url: str, *, timeout_s: float = 600.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.base, self._timeout_s, self._sleep = _base(url), timeout_s, sleep
        self._key = os.environ.get(KEY_VARIABLE, "").encode()
        self._opener = urllib.request.build_opener(_NoRedirect, _Watched)
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
                raise _Failed("the answer is JSON, but no object")
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
        request = _Request(self.base + path, body, timeout_s)
        request.add_header("Content-Type", "application/json")
        request.add_header("User-Agent", "divergence")
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key.decode()}")
        most = _MAX_TOLD_BYTES if payload is None else _MAX_BYTES
        with request.running():
            try:
                with self._opener.open(request, timeout=timeout_s) as response:
                    data = self._without_key(_read(response, request, most))
            except urllib.error.HTTPError as error:
                raise self._refused(error, request) from None
            # ValueError: what http.client makes of numbers that are none
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                if request.is_late or isinstance(reason, TimeoutError):
                    text = f"no answer within {timeout_s:g} s"
                elif isinstance(error, http.client.HTTPException | ValueError):
                    text = "the answer was cut off"
                else:
                    text = f"no connection: {reason}"
                raise _Failed(_line(text)) from None
        try:
            return json_value(data, where=path, error=EndpointError)
        except EndpointError as error:
            shown = _line(data[:80].decode(errors="replace"))
            raise _Failed(f"{error.message}: {shown!r}") from None

    def _refused(self, error: urllib.error.HTTPError, request: _Request) -> _Failed:
        with error:
            try:
                text = self._without_key(_read(error, request, _MAX_TOLD_BYTES))
            except (OSError, http.client.HTTPException, ValueError, _Failed):
                text = b""
        hint = None
        if error.code in (401, 403):
            hint = f"the key is read from {KEY_VARIABLE}"
            text = b""  # some servers quote parts of it
        elif error.code in (301, 302, 303, 307, 308):
            hint = "redirects are not followed: give the address that it names"
        after = error.headers.get("Retry-After", "")
        # not the server's own words for its code, which may quote the key
        status = f"{error.code} {http.client.responses.get(error.code, '')}".strip()
        shown = _line(text[:_SHOWN].decode(errors="replace"))
        return _Failed(
            f"{status}: {shown}" if shown else status,
            status=error.code,
            again=error.code in _AGAIN,
            hint=hint,
            after=float(after) if after.isdecimal() else None,
        )

    def _without_key(self, data: bytes) -> bytes:
        """Return what a server answers, before anything is made of it: no report and no run has the
        key. (A short one is a placeholder, such as EMPTY, and may be a word of an answer.)"""
        return data.replace(self._key, b"***") if len(self._key) >= _SECRET else data


def _line(text: str) -> str:
    return " ".join(text.split())


@dataclass(eq=False)
class _Failed(Exception):
    """One request that gave nothing. ``again``: it may, later, ``after`` so many seconds."""

    text: str
    status: int | None = None
    again: bool = True
    hint: str | None = None
    after: float | None = None


def _read(response: Any, request: _Request, most: int) -> bytes:
    """All of it, at most so much, before the deadline."""
    parts, size = [], 0
    while True:
        part = response.read1(_CHUNK)
        if request.is_late:  # a broken connection reads like an end
            raise TimeoutError
        if not part:
            break
        size += len(part)
        if size > most:
            text = f"the answer is longer than {most:,} bytes"
            raise _Failed(text, again=False, hint="ask for fewer --top-logprobs")
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
