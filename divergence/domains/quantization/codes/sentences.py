"""The sentences of codes: one template for each code. See divergence.facts for the form."""

SENTENCES = {
    # what codes are of
    "of_activations": "activations",
    "of_cache": "keys and values",
    "of_heads": "the {head:q=queries|k=keys|v=values} of {module}",
    "entering": "what enters {module}",
    # what they tell
    "wrong_everywhere": (
        "every quantiser of activations makes wrong codes, from {module} on: a kernel or a scheme, "
        "not one layer"
    ),
    "wrong_at": (
        "the codes of {place} are wrong[[, by {by:letter}]]: its quantiser, or what comes before "
        "it in the block"
    ),
    "no_truth": "no truth",
    "all_equal": "codes of activations: all {num_codes:,} are equal on both sides",
    "round_apart": (
        "codes of activations: {num_different:,} of {num_codes:,} differ, by {most_apart} at "
        "most, at ties: rounding"
    ),
    "beyond": "{place}, {side:none=B's codes against A's|*={side:letter}'s codes}: {looks:list ; }",
    "outliers": (
        "{num:,.0f} of {num_codes:,} are not the nearest to x / scale, but up to {farthest:.1f} "
        "from it"
    ),
    "inward": (
        "{codes:.2f} too {near:yes=near to|no=far from} zero on average (limit {limit:.2g}, "
        "{num_codes:,} codes)"
    ),
    "offset": "{codes:+.2f} on average (limit {limit:.2g}, {num_codes:,} codes)",
    "stretched": "{share:+.2%} in scale (limit {limit:.2g}, {num_codes:,} codes)",
    # where none were made, or none kept
    "none_made": (
        "{side:letter} makes no codes of {place} in {num} of {total} forwards: what it takes there "
        "is no code times its scale"
    ),
    "not_recorded": (
        "codes of {what:list  and of } were not recorded: one that rounding flips looks like a "
        "fault"
    ),
}
