"""The sentences of tokenizers. See divergence.facts for the form."""

SENTENCES = {
    # what the tokenizers say
    "setting": (
        "{name}: {reference:none=none|*={reference}} / {candidate:none=none|*={candidate}}"
    ),
    "part": "{name}: {reference}{key:none= / {candidate}|*=, with {key} {old} / {new}}",
    "template_file": "chat template: another one from character {place} on",
    "only": "{num:,} {num:plural token} only in {side:letter}: {names:names}",
    "other_ids": "{num:,} {num:plural token} under other ids: {names:names}",
    # what becomes of a text
    "start": (
        "it begins with {reference:none=no special token|*={reference:list  }} on A, with "
        "{candidate:none=none|*={candidate:list  }} on B"
    ),
    "twice": "{side:letter} begins with {token} twice",
    "twice_rendered": (
        "{side:letter} begins with {token} twice where it is rendered first and then tokenised "
        "like any text (add_special_tokens)"
    ),
    "end": (
        "it ends with {reference:none=no special token|*={reference:list  }} on A, with "
        "{candidate:none=none|*={candidate:list  }} on B"
    ),
    "template_blanks": "the templates differ in blanks alone: {reference} against {candidate}",
    "template_ending": "{side:letter}'s template goes on: {text}",
    "template_beginning": "{side:letter}'s template begins with {text}",
    "template": "the templates render {reference} against {candidate}",
    "normaliser": "the text is normalised otherwise: {reference} against {candidate}",
    "split": "it is split otherwise: {reference:list  | } / {candidate:list  | }",
    "added": "{token} is one token on {side:letter} alone",
    "flag": "the added token {token} has {name} {reference} / {candidate}",
    "merges": "other tokens of the same piece: {reference:list  | } / {candidate:list  | }",
    "ids": "{token} is {reference} on A, {candidate} on B",
    "truncation": (
        "with truncation, A keeps {reference:,} tokens{cut:none=|*=, cut off on the {cut}}, and B "
        "{candidate:,}{candidate_cut:none=|*=, cut off on the {candidate_cut}}"
    ),
    "kind": "; {num:,} of the {of:,} texts with {kind}, and no other",
    # what two files of examples hold
    "more": (
        "{side:letter} {end:start=begins|end=ends} with {num:,} {num:plural token} more"
        "{twice:yes=, the same again|no=}: {ids:names}"
    ),
    "cut": "{side:letter} is cut off at {length:,} tokens, on the {end:start=left|end=right}",
    "moved": (
        "cut off on two sides: B begins {num:,} {num:plural token} {end:start=behind|end=before} A"
    ),
    "padded": "pads left and right: {reference:list  and } / {candidate:list  and }",
    "other_token": "token {place} is {reference} on A, {candidate} on B",
    "no_labels": "no token has a label on {side:letter}, {num:,} on the other side",
    "labels_lacking": "{side:letter} holds neither labels nor a mask of them",
    "labels_moved": "{side:letter}'s labels stand one token too early: they are moved already",
    "labels_of_pads": "{num:,} {num:plural label} on {side:letter} where attention_mask is 0",
    "labels_before": "{num:,} {num:plural token} more of the prompt have labels on {side:letter}",
    "labels_behind": (
        "{num:,} {num:plural token} more at the end have labels on {side:letter}: {ids:names}"
    ),
    "labels_within": (
        "{num:,} {num:plural token} between have labels on {side:letter} alone: {ids:names}"
    ),
    "labels_values": "the label of token {place} is {reference} on A, {candidate} on B",
}
