"""The page around its sections: one file that needs nothing else and asks nobody for anything.

The policy in its head allows this file's own style and script, by their digests, and pictures that
are part of it: nothing is loaded, no other script runs, nothing is sent. What the script needs
stands in the page as JSON, in which ``<`` is written ``\\u003c``, so that no name ends the element.
The script sets text and attributes and never markup (page.js).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from pathlib import Path

from divergence.html.element import Element, render

__all__ = ["document"]


def document(title: str, body: Element, *, data: str, attachment: bytes = b"") -> str:
    """The whole page. ``data``: JSON for the script. ``attachment``: what is offered for download,
    packed by gzip."""
    style, script = _asset("style.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = Element("title", {}, (title,))
    packed = base64.b64encode(gzip.compress(attachment, mtime=0)).decode() if attachment else ""
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"{render(head)}\n<style>{style}</style>\n</head>\n"
        f"{render(body)[: -len('</body>')]}\n"
        f'<script type="application/json" id="data">{_within_script(data)}</script>\n'
        f'<script type="text/plain" id="attachment">{packed}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _within_script(json: str) -> str:
    return json.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
