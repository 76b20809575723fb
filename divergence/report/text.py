"""A document as lines of a terminal, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from divergence.document import Block, Document, Fold, Headline, Section, Sentence, Table, named
from divergence.layout import (
    BLANK,
    MAX_WIDTH,
    Line,
    Span,
    cut,
    fold,
    heading,
    line,
    next_lines,
    prose,
)
from divergence.words import list_names, markdown_code, printable, shortened

_STYLES = {
    "onset": "bold red",
    "odd": "bold red",
    "wrong": "bold red",
    "flagged": "yellow",
    "below": "yellow",
    "differs": "yellow",
    "good": "green",
    "blocks": "red",
}
_MOST_NAMED = 6
_SIGNS = {"flagged": "!", "wrong": "!", "below": "?"}
_MOST_LINES, _WIDEST = 200, 400
"""Of a terminal's lines in Markdown."""
_LEAST, _LEAST_NAME = 30, 8
"""Letters of a row's last words before they go on below, and of a name that is cut."""


def document_lines(
    whole: Document, *others: Document, verbose: bool = False, every: bool = False
) -> list[Line]:
    """The answer, what it is about, why, each section, and what to run next; then those of
    ``others``. ``verbose``: also the sections for who wants more; ``every``: all rows of tables."""
    if others:
        following = document_lines(*others, verbose=verbose, every=every)
        return [*document_lines(whole, verbose=verbose, every=every), BLANK, *following]
    lines = headline_lines(whole.headline)
    if whole.known:
        lines += [BLANK, *map(sentence_line, whole.known)]
    why = Section(title="why", body=[Sentence(text, "-", indent=2) for text in whole.why])
    shown = [section for section in whole.sections if verbose or every or not section.verbose]
    left = [
        section.title or section.heading[:1].lower() + section.heading[1:]
        for section in whole.sections
        if section not in shown and section.body
    ]
    if sections := sections_lines([*[why] * bool(whole.why), *shown], every):
        lines += [BLANK, *sections[:-1]]
    if left:
        hint = f"{list_names(left, _MOST_NAMED)}: add -v"
        lines.append(sentence_line(named("more", hint, "dim")))
    return [*lines, BLANK, *next_lines(whole.next)] if whole.next else lines


def document_markdown(*documents: Document, made_by: str) -> str:
    """The same to paste into an issue, with nothing in it that Markdown obeys. ``made_by``: the
    command and its version."""
    lines = []
    for whole in documents:
        headline = whole.headline
        lines += [f"**{headline.word}**: {markdown_code(headline.text)}", ""]
        lines += _listed_markdown([*headline.facts, *whole.known, *map(Sentence, whole.why)])
        for section in whole.sections:
            lines += _titled_markdown(section)
            for block in _unfolded(section.body):
                if isinstance(block, Table):
                    lines += _titled_markdown(block)
                    lines += [*block.on("terminal").markdown(), ""]
                elif isinstance(block, Sentence):
                    lines += _listed_markdown([block])
        lines += [f"Next: {markdown_code(command)}<br>" for command in whole.next]
    return "\n".join([*lines, "", f"Made by {made_by}."]) + "\n"


def fenced_lines(lines: Iterable[Line]) -> list[str]:
    """Lines of a terminal as a block of code of Markdown, which obeys nothing in them."""
    pieces = [piece.text for item in lines for piece in fold(item, MAX_WIDTH)]
    texts = [printable(shortened(text, _WIDEST)) for text in pieces[:_MOST_LINES]]
    texts += [f"{len(pieces) - _MOST_LINES:,} more lines"] * (len(pieces) > _MOST_LINES)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", "\n".join(texts))), default=0))
    return [fence, *texts, fence, ""]


def _titled_markdown(part: Section | Table) -> list[str]:
    if not part.title:
        return []
    detail = f": {markdown_code(part.detail)}" if part.detail else ""
    return [f"**{markdown_code(part.title)}**{detail}", ""]


def _listed_markdown(sentences: Iterable[Sentence]) -> list[str]:
    """A list of them, with a blank line behind it."""
    texts = [(item.label.strip("-: "), item.text) for item in sentences]
    listed = [f"- {markdown_code(f'{label}: {text}' if label else text)}" for label, text in texts]
    return [*listed, ""] if listed else []


def headline_lines(headline: Headline) -> list[Line]:
    """The answer, then each fact on a line of its own."""
    word = line((f"{headline.word}: ", headline.style)).spans if headline.word else ()
    sentence = Span(headline.text, "" if headline.word else headline.style)
    return [Line((*word, sentence), 2), *map(sentence_line, headline.facts)]


def sections_lines(sections: Iterable[Section], every: bool = False) -> list[Line]:
    """All of them, with a blank line behind each."""
    lines: list[Line] = []
    for section in sections:
        if not section.body and not section.detail:
            continue
        shown = [heading(section.title, section.detail)] if section.title else []
        for block in _unfolded(section.body):
            if isinstance(block, Table):
                inner = block.listed or block.indent > 2
                if block.title and not inner and (len(shown) > 1 or not section.title):
                    shown += [*[BLANK] * bool(shown), heading(block.title, block.detail)]
                content = block.on("terminal", every=every)
                shown += _listed_lines(content) if block.listed else table_lines(content)
            elif isinstance(block, Sentence):
                shown.append(sentence_line(block))
        lines += [*shown, BLANK]
    return lines


def _unfolded(blocks: Iterable[Block | None]) -> Iterator[Block | None]:
    for block in blocks:
        yield from _unfolded(block.body) if isinstance(block, Fold) else [block]


def sentence_line(sentence: Sentence) -> Line:
    label = " " * sentence.indent + (f"{sentence.label} " if sentence.label else "")
    hang = len(label) if sentence.hang is None else sentence.hang
    if sentence.whole:
        return line(" " * hang + sentence.text)
    return prose(label, sentence.text, style=sentence.style, width=hang)


def _listed_lines(table: Table) -> list[Line]:
    """Both values where they differ, and below them what else is known."""
    lines = []
    for number, (name, state, *both) in enumerate(table.cells()):
        text, style = " / ".join(dict.fromkeys(both[:2])), _style([table.mark(number)])
        lines.append(prose(f"  {state:<8}{name}:", text, style=style, width=10))
        lines += [prose("", detail, width=10) for detail in both[2:] if detail]
    return lines


def table_lines(table: Table) -> list[Line]:
    """Titles where there are any, rows with their marks in front, what stands below a row, and how
    many rows are not here. Words begin at the left of their column, figures end at its right."""
    titles = [table.titles] if any(table.titles) and not table.bare else []
    cells = [*titles, *(tuple(map(printable, row)) for row in table.cells())]
    words = [mark.split() for mark in table.marks] or [[]] * len(cells)
    words = [[]] * len(titles) + words
    signs = list(map(_sign, words))
    margin = max([table.indent, *map(len, signs)])
    at_left, columns = table.is_word, [column for _, column in table.shown]
    *sizes, last = [
        max([column.width, *map(len, texts)])
        for column, *texts in zip(columns, *cells, strict=True)
    ]
    # where a row is too wide words are cut, the widest first and those of the first column last;
    # the last ones may go on below, and need no more than some letters
    room = MAX_WIDTH - margin - 2 * len(sizes) - (min(last, _LEAST) if at_left[-1] else last)
    names = [number for number in range(len(sizes)) if at_left[number]]
    for _ in range(sum(sizes) - room):
        wide = [n for n in names if sizes[n] > max(_LEAST_NAME, columns[n].width)]
        if wide:
            sizes[max(wide, key=lambda n: (n > names[0], sizes[n]))] -= 1
    lines = []
    for number, (row, marks, sign) in enumerate(zip(cells, words, signs, strict=False)):
        lead = sign.ljust(margin)
        for cell, size, left in zip(row, sizes, at_left, strict=False):
            lead += (cut(cell, size).ljust if left else cut(cell, size).rjust)(size) + "  "
        style = "dim" if number < len(titles) else _style(marks)
        spans = Span(lead, style), Span(row[-1] if at_left[-1] else row[-1].rjust(last), style)
        lines.append(Line(spans, hang=None if table.whole else len(lead)))
        lines += map(sentence_line, table.below.get(number - len(titles), ()))
    if table.num_more:
        lines.append(line((f"  … {table.num_more:,} more ({table.more})", "dim")))
    return lines


def _style(marks: Sequence[str]) -> str:
    return next((_STYLES[word] for word in marks if word in _STYLES), "")


def _sign(marks: Sequence[str]) -> str:
    """Return what tells a row's marks without colours."""
    sign = next((_SIGNS[word] for word in marks if word in _SIGNS), " ")
    arrow = ">" if {"onset", "odd"}.intersection(marks) else " "
    return f" {arrow}{sign} " if (arrow + sign).strip() else ""
