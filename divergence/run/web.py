"""A run below ``http://``: any machine may stand behind a URL, so what it may answer is bounded.

What is asked for lies below the URL, by the names that files of a run have: of a server's pages of
links only these count. A redirect is followed, but never into a network that is nearer to this
machine than the URL's own host: neither to its loopback nor to the service of a cloud that gives
away credentials. Addresses are checked where connections are made, so no name hides one.
"""

from __future__ import annotations

import html
import ipaddress
import re
import socket
from typing import Any
from urllib.parse import urljoin, urlsplit

from divergence.errors import RunError
from divergence.run.record import MANIFEST, SHARD_PATTERN, is_records_name

SILENCE_S = 30
"""Without a byte, or a connection."""
REQUEST_S = 300
"""For one request, however steadily it trickles; at most 8 MiB are asked for at once."""
MAX_BODY_BYTES = 256 << 20
"""Of one answer: a server that knows no ranges sends all of a file each time, or never ends."""
MAX_PAGE_BYTES = 16 << 20
"""Of a page of links."""

_LINK = re.compile(rb"""href\s{0,9}=\s{0,9}["']([^"'<>\s]{1,2000})["']""", re.IGNORECASE)


def linked(page: bytes, url: str, base: str) -> set[str]:
    """The files of a run below ``base`` that the page at ``url`` links to, by name."""
    names = set()
    for link in _LINK.findall(page):
        try:
            target = urljoin(url, html.unescape(link.decode(errors="replace")))
        except ValueError:  # no address, as of brackets that do not close
            continue
        name = target.removeprefix(base)
        if name != target and (
            name == MANIFEST or is_records_name(name) or re.fullmatch(SHARD_PATTERN, name)
        ):
            names.add(name)
    return names


def web_options(url: str, *, refused: type[RunError]) -> dict[str, Any]:
    """What fsspec's http:// is told. ``refused``: what is raised where a redirect leads to a place
    that it may not. ImportError where its package is not installed."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                most = MAX_PAGE_BYTES if self.content_type == "text/html" else MAX_BODY_BYTES
                parts, size = [], 0
                async for part in self.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        self.close()
                        raise ValueError(
                            f"the server answers with over {most >> 20} MiB to one request; it "
                            "must know ranges (HTTP 206)"
                        )
                self._body = b"".join(parts)
            return self._body

    nearest = max(map(_nearness, _addresses(urlsplit(url).hostname)), default=0)

    def connecting(info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, address = info
        if _nearness(address[0]) > nearest:
            raise refused(
                f"the server sends on to {address[0]}, which is nearer to this machine than itself",
                where=url, hint="if that is meant: give the URL that it sends to",
            )  # fmt: skip
        return socket.socket(family, kind, protocol)

    async def client(**_: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=connecting),
            timeout=aiohttp.ClientTimeout(
                total=REQUEST_S, sock_connect=SILENCE_S, sock_read=SILENCE_S
            ),
            headers={"Accept-Encoding": "identity"}, response_class=Bounded,
        )  # fmt: skip

    return {"get_client": client, "skip_instance_cache": True}


def _addresses(host: str | None) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):  # connecting says so
        return []


def _nearness(address: str) -> int:
    """0 the internet, 1 a private network, 2 this machine, 3 what is no host's (link-local)."""
    place = ipaddress.ip_address(address)
    place = getattr(place, "ipv4_mapped", None) or place
    if place.is_loopback:
        return 2
    if place.is_link_local or place.is_unspecified or place.is_multicast:
        return 3
    return 0 if place.is_global else 1
