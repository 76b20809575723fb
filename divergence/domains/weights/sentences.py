"""The sentences of weights. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # the same weights, stored otherwise
    "equal": "equal bit for bit",
    "dtype": "equal values, {reference} / {candidate}",
    "rounded": (
        "rounded to {form} on {side:letter}{stored:yes=|no=, and stored wider}"
        "[[, {over:,} of them too large for it: not finite there]]"
        "[[, {lost:,} of them too small for it: 0 there]]"
    ),
    "transposed": "transposed, {reference:lengths} / {candidate:lengths}[[, and {rest}]]",
    "reshaped": (
        "the same numbers in another shape, {reference:lengths} / {candidate:lengths}"
        "[[, and {rest}]]"
    ),
    "padded": (
        "the first {rows:,} {what} are equal, and {side:letter} has {num:,} more"
        "{zeros:yes=, of zeros|no=}[[; these are {rest}]]"
    ),
    "fused": "{names:list  + } of {other:letter} are {whole} of {side:letter}[[, {order}]]",
    "fused_mixed": "their rows mixed",
    "fused_groups": "in {num:,} groups of {rows:list  + } rows",
    "fused_heads": (
        "{num:none=as of one head of keys: of several Megatron takes a group for each head, and no "
        "config.json beside the weights says how many (num_key_value_heads)|*=where Megatron takes "
        "{num} groups, one for each head of keys}"
    ),
    "fused_otherwise": (
        "where {by:name=loaders take|blocks=other blocks have} {names:list  + }[[, {order}]]"
    ),
    "tied": "written out on {side:letter}, where it equals {key}; {other:letter} has that alone",
    "merged": "the adapter is merged, up to rounding",
    "product": "the same product of other factors",
    # other weights
    "unmerged": "the adapter's base, to which nothing was added",
    "product_times": "{factor:.4g} times A's product, as of another alpha",
    "merged_times": "the adapter is merged {factor:.2g} times over",
    "reordered": (
        "the same {what} in another order[[: {to:halves=pairs of neighbours became halves|"
        "pairs=halves became pairs of neighbours} within {turned:0=|*={turned} rows of }"
        "heads of {head}]]"
        "[[: blocks of {blocks} moved]] ({moved:,} of {total:,} moved)[[, and {rest}]]"
    ),
    "scaled": "B = {factor:.6g} × A[[, and {rest}]]",
    "scales": "each {what} of B is A's times a factor of its own, from {least:.3g} to {most:.3g}",
    "again": "are {what} {places:names}{more:yes=, …|no=} of A once more",
    "shifted": "B = A + {constant:.6g}",
    "rounding": "{percent:.2g}% apart, as rounding in another order leaves them",
    "adapter": (
        "{side:letter} is a LoRA adapter of {base} (rank {rank}, alpha {alpha:g}, {num} matrices)"
        "{merged:yes=, merged here into it|no=, by the products that it adds}"
    ),
    "low_rank": "a difference of rank {rank}, {percent:.2g}% of A's, as a merged adapter makes it",
    "quantised": (
        "{percent:.2g}% apart, {side:letter}'s on a grid of {form:none={bits} bits|*={form}} "
        "{group:none=a row|*=in groups of {group}}"
    ),
    "some": (
        "{num:,} of {of:,} {what} differ ({places:names}{more:yes=, …|no=}), the others are equal"
        "{rounded:yes= but for rounding|no=}[[; these {rest}]]"
    ),
    "one_vector": (
        "one vector is added to every row, {percent:.2g}% of A's: of a head, the same number to "
        "all logits of a token, which no probability shows"
    ),
    "moved": "{other} of A is there",
    "copy": "{side:letter} has {key} there as well, as if tied; the other side does not",
    "coded": "{percent:.2g}% apart, stored as {form} on {side:letter}",
    "near": "{percent:.2g}% apart",
    "unrelated": "unrelated (cosine {cosine:.2g}), as of another initialisation or another model",
    "cut_off": "cut off to bfloat16 on {side:letter}, not rounded to the nearest",
    "rotated": (
        "each {what} turned by one orthogonal matrix, as programs that quantise turn hidden states"
    ),
    "zeros": "all zeros on {side:letter}",
    "constant": "{value:g} everywhere on {side:letter}, as of a fresh initialisation",
    "nonfinite": "{num:,} {num:plural number} on {side:letter} not finite",
    "codes": "{num:,} of {total:,} whole numbers differ",
    "shapes": "{reference:lengths} / {candidate:lengths}",
    "other": "other values, as far as digests tell",
    "alone": "only on {side:letter}",
    "packed": "packed codes of {kind} on {side:letter}, which are not unpacked here",
    "unturned": (
        "{rest}, with the rows of halves, where {program} takes pairs of neighbours within each "
        "head"
    ),
    "unshifted": "{rest}, where {program} takes norms with 1 added",
    "turned": "{rest}; as {program} wants it",
    # how names were read
    "program": "names of {side:letter} are {program}'s, read as transformers' own",
    "gguf": "names of GGUF were read as those of its architecture {architecture}",
    "digests": "{side:letter} is a run: it holds digests of its weights, and no weights",
}
