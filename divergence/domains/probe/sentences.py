"""The sentences of two probes. See divergence.facts for the form."""

SENTENCES = {
    # a step of selftest
    "seen_arithmetic": (
        "{num} facts, {num_odd} other than the CPU's[[: {odd:list ; }]][[ and {num_more} more]]"
    ),
    # two probes
    "tensors_differ": "{num_different} of {total} recorded tensors differ",
    "tensors_without_partner": "{num} tensors had no partner: other shapes or orders",
    "no_fact_in_common": "the runs hold no fact in common",
    "other_precision": (
        "the two machines compute in other precision: {num:count fact} differ, {num_precise} of "
        "them in precision"
    ),
    "other_rounding": (
        "the two machines round differently: {num:count fact} differ, none of them in precision"
    ),
    "same_arithmetic": (
        "the probed arithmetic is the same"
        "[[, and all {num_same} recorded tensors are equal bit for bit]]"
    ),
    "not_all_compared": "not everything was compared",
}
