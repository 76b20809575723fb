"""The sentences of tokenizers. See divergence.facts for the form."""

SENTENCES = {
    # what the tokenizers say
    "setting": "{name}: {reference:none=none} / {candidate:none=none}",
    "part": "{name}: {reference}{candidate:none=, otherwise set|*= / {candidate}}",
    "template_file": "chat template: another one from character {place} on",
    "only": "{num:,} {num:plural token} only in {side:letter}: {names:names}",
    "other_ids": "{num:,} {num:plural token} under other ids: {names:names}",
    # what becomes of a text
    "start": (
        "it begins with {reference:none=no special token|*={reference:list  }} on A, with "
        "{candidate:none=none|*={candidate:list  }} on B"
    ),
    "twice": "{side:letter} begins with {token} twice",
    "end": (
        "it ends with {reference:none=no special token|*={reference:list  }} on A, with "
        "{candidate:none=none|*={candidate:list  }} on B"
    ),
    "template_blanks": "the templates differ in blanks alone: {reference} against {candidate}",
    "template_ending": "{side:letter}'s template goes on: {text}",
    "template": "the templates render {reference} against {candidate}",
    "normaliser": "the text is normalised otherwise: {reference} against {candidate}",
    "split": "it is split otherwise: {reference:list  | } / {candidate:list  | }",
    "added": "{token} is one token on {side:letter} alone",
    "merges": "other tokens of the same piece: {reference:list  | } / {candidate:list  | }",
    "ids": "{token} is {reference} on A, {candidate} on B",
}
