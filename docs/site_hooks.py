"""The documents as a site: what lies outside docs/ and is linked to becomes a page, or a name.

Called by mkdocs (mkdocs.yml, hooks). The documents themselves are written for a reader of the
repository, where `../README.md` is a file.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    name: name.lower() for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md")
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of the repository's root stand beside the others."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to pages lead to them; what is no page of the site is named and not linked to."""
    outside = page.file.src_uri in PAGES.values()
    folder = ROOT if outside else ROOT / "docs"

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        place = path.relative_to(ROOT).as_posix()
        if place in PAGES:
            return f"[{text}]({PAGES[place]}{anchor})"
        if place.startswith("docs/"):
            return f"[{text}]({place.removeprefix('docs/')}{anchor})"
        return f"{text} (`{place}`)" if place not in text else text

    markdown = _LINK.sub(link, markdown)
    return re.sub(r'src="docs/', 'src="../', markdown) if outside else markdown
