"""`divergence tokens`: two tokenizers over a file of texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from divergence.cli.answers import exit_with, progress_bars, show_document
from divergence.document import Column, Document, Headline, Section, Sentence, Table, named
from divergence.domains.tokenizers.result import TokensReport
from divergence.options.commands import TRUST, Output
from divergence.options.option import option
from divergence.words import count


def tokens(
    *,
    reference: str = option(
        "A", "A tokenizer: a directory, or a name on the hub; or a file of examples.", default=...
    ),
    candidate: str = option("B", "Another one.", default=...),
    texts: Path | None = option(
        "--texts FILE",
        "Texts for two tokenizers: .txt (one a line), .jsonl or .json with text or messages.",
        default=None,
    ),
    chat: bool = option("--chat", "Put texts through the chat templates.", default=False),
    trust_remote_code: bool = TRUST,
    exit_code: bool = option("--exit-code", "Exit 1 if a text differs.", default=False),
    output: Output,
) -> None:
    """No model is loaded. Each text that becomes other token ids is put down to the first
    thing that makes another of it: the template, the normaliser, the split, the merges, an
    added token; special tokens around it are told beside. Two files of examples (JSON lines with
    input_ids, and labels or a mask of them) are held against one another as they are.

    Examples:
    divergence tokens ./hf-model ./converted --texts prompts.txt
    divergence tokens Qwen/Qwen3-0.6B ./fine-tuned --texts chats.jsonl     # with messages
    divergence tokens old new --texts prompts.txt --chat --exit-code || echo "other tokens"
    divergence tokens ours.jsonl theirs.jsonl             # label masks, truncation, padding

    Exit codes: 0 done, whatever was found; 1 with --exit-code where a text differs; 2 a
    tokenizer or the texts cannot be read.
    """
    from divergence.domains.tokenizers.compare import compare_tokens

    with progress_bars(quiet=output.silent) as progress:
        report = compare_tokens(
            reference,
            candidate,
            texts=texts,
            chat=chat,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    show_document(tokens_document(report), output, json=partial(report.to_json, indent=2))
    if exit_code and not report.equal:
        exit_with(1)


def tokens_document(report: TokensReport) -> Document:
    """Return what is shown of it."""
    num = report.num_texts - report.num_equal
    word, style, text = "OTHER TOKENS", "bold red", f"in {num} of {count(report.num_texts, 'text')}"
    if report.equal:
        word, style = "IDENTICAL", "bold yellow" if report.causes else "bold green"
        text = f"all {count(report.num_texts, 'text')} become the same tokens"
    if report.causes:
        text += f"; in {report.causes[0].num_texts} of them {report.causes[0].text}"
    if report.reference.kind == "examples":
        text = text.replace("become", "hold")
    sides = [
        named(name, f"{side.source}: {side.kind}, {side.num_tokens:,} tokens")
        for name, side in (("A", report.reference), ("B", report.candidate))
    ]
    numbers = " / ".join(f"{num:,}" for num in report.num_tokens)
    sides.append(named("texts", f"{report.num_texts:,}, {numbers} tokens"))
    table = Table(
        columns=("what", "texts", "first", Column("the text there", repr, left=True)),
        rows=[(cause.name, cause.num_texts, cause.first, cause.shown) for cause in report.causes],
        below={  # a lone one stands in the headline
            n: [Sentence(cause.text)] for n, cause in enumerate(report.causes) if report.causes[1:]
        },
    )
    sections = [Section(title="why", body=[table])] if report.causes else []
    if report.settings:
        body = [Sentence(text, indent=2) for text in report.settings]
        sections.append(Section(title="what the tokenizers say of themselves", body=body))
    return Document(headline=Headline(word, text, style), known=sides, sections=sections)
