"""How long and how much a web server may answer: any machine may stand behind a URL."""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_BODY_BYTES", "REQUEST_S", "SILENCE_S", "web_options"]

SILENCE_S = 30
"""Without a byte, or a connection."""
REQUEST_S = 300
"""For one request, however steadily it trickles; at most 8 MiB are asked for at once."""
MAX_BODY_BYTES = 256 << 20
"""Of one answer: a server that knows no ranges sends all of a file each time, or never ends."""


def web_options() -> dict[str, Any]:
    """What fsspec's http:// is told; ImportError where its package is not installed."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                parts, size = [], 0
                async for part in self.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_BODY_BYTES:
                        self.close()
                        raise ValueError(
                            f"the server answers with over {MAX_BODY_BYTES >> 20} MiB to one "
                            "request; it must know ranges (HTTP 206)"
                        )
                self._body = b"".join(parts)
            return self._body

    timeout = aiohttp.ClientTimeout(
        total=REQUEST_S, sock_connect=SILENCE_S, sock_read=SILENCE_S
    )  # fmt: skip
    return {"client_kwargs": {"timeout": timeout, "response_class": Bounded}}
