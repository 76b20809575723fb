"""The sentences of operator suites. See divergence.facts for the form."""

SENTENCES = {
    "all_same": (
        "all {total} results have the same bits[[, but {wrong:names 6} beyond what rounding "
        "explains on both]]"
    ),
    "differ_unjudged": (
        "{num_differ} of {total} results differ, the most in {operator} (relative difference "
        "{rel_l2:.1e}); only a truth tells which side is right"
    ),
    "within_rounding": (
        "{num_differ} of {total} results differ; both sides are as right as rounding allows"
    ),
    "worse": (
        "{side:both=both sides|*={side:letter}} computed {num_wrong} of {total} operators worse "
        "than rounding explains: {wrong:names 6}"
    ),
    "operator": ("{operator}: {side:letter}, {reason} ({case}); {num} of {num_cases} results"),
    # why a case is beyond its limit, or not the same
    "nonfinite": "{num_nonfinite} values are nan or inf",
    "score": "{score:short} times what rounding explains",
    "gain": "rows are scaled by {gain:short} standard deviations",
    "codes_off": "{off_by_one:.2%} of codes off by one, {off_by_more:.2%} by more",
    "rows_wrong": "{rows_wrong:.1%} of rows choose otherwise than the definition",
    "flushed": "subnormals become 0",
    "tied": "another of exactly equal scores than the first",
    # what was not compared, or otherwise run
    "no_partner": "no partner",
    "other_inputs": "the inputs are not the same bytes",
    "other_results": (
        "{reference_dtype} [{reference_shape:list}] and {candidate_dtype} [{candidate_shape:list}]"
    ),
    "skipped": "{side:letter} skipped {num} cases: {reason}",
    "used": "{side:letter} used {name} {used} instead of {reference}",
    "not_every_case": "not every case was compared",
}
