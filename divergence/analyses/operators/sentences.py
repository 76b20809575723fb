"""The sentences of operators. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # the verdict's headline
    "made_at": (
        "the error {seems:yes=seems to be made|no=is made} at {site}"
        "[[, which {consumer} is given as {argument}]][[: {region}]]"
    ),
    "called_with": "{site} is called with {operands:list  and }",
    "other_mask": "the sides hide other scores at {site}: {mask}",
    "rounded_too_often": (
        "sums are rounded too often at {site}: {region}, {ratio:.2g} × the error of an ideal "
        "product"
    ),
    "comes_from_lone": (
        "the error comes into {site} from operators that only {side:letter} calls: {makers:list}"
    ),
    "comes_in": "the error comes into {site}: its input {argument} {how}",
    "all_equal": "all {num_matched} operators are equal bit for bit",
    "all_near": (
        "every operator is as near to {judged:truth=the truth|*=the other side} as rounding allows"
    ),
    # its evidence
    "why": "{site}[[ ({called_at})]], {phase}: {reason}",
    "called_at": "{backward_of:none={source}|*=backward of {backward_of}[[, {source}]]}",
    "operand": (
        "{argument}={side:candidate={candidate} (A {reference})|reference={reference} (B "
        "{candidate})}"
    ),
    "operands": "{operands:list  and }",
    "called": "called with {operands:list  and }[[; {farther}]]",
    "mask": (
        "in {shows:letter} {of_tokens:yes=token {query} sees token {key}|no=query {query} sees key "
        "{key}}, which {hides:letter} hides"
    ),
    "mask_counts": (
        "{mask}; hidden by A alone: {num_by_reference:,}, by B alone: {num_by_candidate:,}"
    ),
    "rounded_on_the_way": (
        "{region}: what {side:letter} adds there is {ratio:.3g} × the error of an ideal product, "
        "so sums are rounded to {dtype} on the way"
    ),
    "integers_differ": (
        "{codes:.2%} of its integers differ, more than rounding of its inputs explains"
    ),
    "nonfinite": "{side:letter} has nan or inf where the other side has none",
    "both_far": (
        "both are far from the truth: {reference_error:.2e} and {candidate_error:.2e}, ideal "
        "{floor:.2e}"
    ),
    "differ": "the sides differ by {difference:.2e}, more than what came in explains",
    "farther": (
        "{side:letter}'s error is {ratio:inf=infinitely|*={ratio:.3g}} × {other:letter}'s"
        "{why:row= in one row|column= in one column|slice= in one slice|*=}; typically off by "
        "{own:.2e} and {other_error:.2e}, ideal {floor:.2e}"
    ),
    "other_dtype": "its result is {reference} in A and {candidate} in B",
    "fed_well": "what feeds it is fine: W at most {w_entering:figure} there",
    "other_input": (
        "its input {argument} {how}: {reference} in A, {candidate} in B"
        "[[ (they differ by {difference:.2g})]]"
    ),
    "viewed": "is looked at differently",
    "input_differs": "differs by {difference:.2g}",
    "other_origin": "comes from elsewhere",
    "same_inputs": "both sides had the same inputs, bit for bit",
    "lone_feeds": "what feeds it has no partner in {side:letter}: {calls:list}",
    "lone_call": "{site}[[ ({source})]]",
    "cause": (
        "with A's result in its place {holds:yes=everything after it is fine (largest share of a "
        "limit {before:.2g} → {after:.2g})|no=what follows is still off: {still:names 3}}"
    ),
    "other_operand": (
        "{argument}, {kind:constant=made outside the recorded modules|*=in the call}: {reference} "
        "in A, {candidate} in B[[, {share:.2%} off]]"
    ),
    "change_within_rounding": (
        "what that changes here is within rounding: the number differs for sure"
    ),
    "meaning_not_known": "the truth is of A's code: it cannot tell which value is meant",
    "as_one_step": "compared as one step[[, from {inputs:list}]]: {region}",
    "own_errors": (
        "against float64 from each side's own inputs they add {candidate_times:.3g} × the error "
        "of an ideal product, A's {reference_times:.3g} ×"
    ),
    "arithmetic_behind": "arithmetic behind {operator} in {dtypes:list  and }: {what}",
    "arithmetic_same": (
        "the probed arithmetic behind {operator} in {dtypes:list  and } is the same on both "
        "sides ({probes:list}): look at software and data first"
    ),
    "none_beyond": (
        "none of {num_operators} operators is beyond its limit; the largest uses "
        "{largest_limit_usage:.0%} of it"
    ),
    "beside_blocks": ("the blocks' own outputs are within the floor: seen in the operator alone"),
    # what a check lacks
    "shows_nothing": "what it changes here is within rounding",
    "no_truth": "no truth: judged by the two sides' difference",
    "not_all": "some operators had no partner, or are not judged",
    # values of operands
    "origin": (
        "{name:none=outside the block|*={name}}[[ via {via:list  }]][[ from element {element}]]"
    ),
    "strided": "{origin}{strides:none= contiguous|*= with strides ({strides:list})}",
    "numbers": "{scalar:yes={numbers:list}|no=[{numbers:list}]}",
    "num_set": "{num_set} of {total} set",
    "zeros": "{total} zeros",
    "num_masked": "{num_set} of {total} masked",
    "norm": "{total} values of norm {norm:.6g}",
    # regions
    "calls": (
        "{num:1=one {kind:product_with_bias=product with bias|fused_attention=fused attention|"
        "fused_norm=fused norm|*={kind}}|*={num} {kind:product_with_bias=products with bias|"
        "softmax=softmaxes|fused_attention=fused attentions|fused_norm=fused norms|*={kind}s}}"
    ),
    "more_calls": "{num} more",
    "no_calls": "nothing",
    "in_place_of": (
        "{candidate:series}[[ ({candidate_shape:shape})]] in place of {reference:series}"
        "[[ ({reference_shape:shape})]]"
    ),
    "other_layouts": "{calls:series} with other casts or layouts",
    # what was not judged, and why
    "pads": (
        "not judged: {num} results that may hold the batch's pads ({paths:list}{more:yes=, "
        "…|no=}); capture without --batch"
    ),
    "rerouted": (
        "could not be judged: the backward behind experts that rounding chose otherwise for some "
        "tokens, in {num:plural prompt} {samples:list}"
    ),
    "unreached": "{calls:series} of {side:letter} ({paths:list}{more:yes=, …|no=})",
    "nothing_common": (
        "could not be compared: {sides:list  and } have no result in common with the other side's"
    ),
    "two_dtypes": "the runs are of two dtypes: their operators are shown, but not judged",
    "other_batches": ("operators are not compared, since they ran in other batches; modules are"),
    "other_block_inputs": (
        "operators are not compared: their blocks had other inputs (repeat one run from the "
        "other: capture --like)"
    ),
    "one_side_only": (
        "operators are not compared: {side:letter} recorded {num:,}, {other:letter} none"
    ),
}
