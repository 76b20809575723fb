"""The sentences of blocks: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # equal, or not measured
    "all_equal": "all {num} compared tensors are equal bit for bit",
    "most_without_partner": "; most had no partner: {num} tensors or tokens",
    "without_partner": " ({num} tensors or tokens had no partner)",
    "both_far": "; both are far from the truth",
    "not_all_compared": "not everything was compared",
    "weights": "weights: {relation}",
    "own_noise": "{what}: differences include its own noise",
    "not_anchored": ("not anchored, so judged from free runs: step {steps:list}{more:yes= …|no=}"),
    "estimate": "in the {phase} ±{typical:.0%} (at worst ±{worst:.0%})",
    "estimated": (
        "{num_estimated} of {num} differences are estimated from sketches; relative L2 "
        "{errors:list}, in 95 of 100 cases"
    ),
    "unmeasured": (
        "{num_unmeasured} of {num} compared tensors differ, but by how much is not known: neither "
        "bytes nor sketches of both sides are left"
    ),
    "statistics_agree": (
        "of {num_agree} of {num} compared tensors it is not known whether they differ: their "
        "statistics agree"
    ),
    "at_least_apart": (
        "by their statistics, at {site} ({pass_}, step {step}) the two are at least "
        "{at_least:.1e} apart (relative L2)"
    ),
    # what statistics show by themselves
    "apart_at_least": (
        "apart by more than rounding explains, first seen at {site}: by their statistics at least "
        "{least:.1e} (relative L2), where rounding makes up to {limit:.1e}"
    ),
    "other_integers": (
        "other integers at {site}, by their statistics: other inputs, or another choice; integers "
        "do not round"
    ),
    "made_at_or_before": (
        "the first place where statistics show it: it is made there, or before it where they do not"
    ),
    "most_apart": (
        "beyond rounding at {num} of {total} places, most at {site}: at least {least:.1e}, limit "
        "{limit:.1e}"
    ),
    "statistics_show_nothing": (
        "nothing seen at {num} places, and statistics cannot show less[[ than {smallest:.1e} "
        "(relative L2, at {at})]][[, {largest:.1e} at {end}]]"
    ),
    "one_sided": (
        "norms, means and extremes that agree are no proof: what turns a tensor without making it "
        "longer is not seen, whatever its size"
    ),
    "first_apart": (
        "statistics differ at {num} of {total} places, first at {site} (step {step}), by no more "
        "than rounding explains"
    ),
    "bounds_of_experts": (
        "no place is judged: blocks choose experts, and a tie that goes the other way moves "
        "statistics too"
    ),
    # what may be off, or not
    "end_of_tail": (
        "{control:none=one token's error at {site} is {ratio:.0f} × what rounding makes, and "
        "others lead up to it: sharp attention does that, and so does a small fault|*=the error at "
        "{site} is {ratio:.1f} × what rounding makes, and in the other blocks {control:.1f} ×: it "
        "is wrong alone, or all are}; a truth tells them apart"
    ),
    # nan and inf
    "num_nonfinite": "{num:none=some|*={num}} {what}",
    "nonfinite_shared": "{what:list  and } on both sides, first at {site}: equal, but no result",
    "nonfinite_apart": (
        "nan or inf on both sides first at {site}, each where the other has a number"
    ),
    "nonfinite_other_kind": (
        "nan and inf of another kind or sign on the two sides, first at {site}"
    ),
    "nonfinite_alone": (
        "{what:list  and } in {side:letter} first at {site}, where the other side has "
        "{fewer:yes=fewer|no=none}"
    ),
    "in_prompts": ", in {prompts}",
    "nonfinite_counts": (
        "{site}: of {num_elements} elements A has {reference_nan} nan and {reference_inf} "
        "inf{reference_neginf:0=|*= ({reference_neginf} of them -inf)}, B {candidate_nan} nan "
        "and {candidate_inf} inf{candidate_neginf:0=|*= ({candidate_neginf} of them -inf)}; "
        "{num_apart:0=equal at each|1=1 differs|*={num_apart} differ}"
        "{counted:yes=|no= (1 where the statistics tell that there are some, and not how many)}"
    ),
    # a family: what "every ..." is about
    "kind_at": "{place} ({kind})",
    "kind_input": "input of {place} ({kind})",
    "kind_entering": "{kind} ({place}, what enters {module})",
    "kind_of_type": "{kind} of type {type}",
    "kind_products": "{kind} ({dtype} matrix products)",
    # what the escalated pass says
    "escalated": (
        "escalated pass: {of_token:yes=one token's error is |no=}{ratio:.3g} × what float32 "
        "rounding makes at {site} (limit {limit:.1f})[[, {side:letter} {times:.3g} × as far from "
        "the truth as the other side]]; {stays:yes=a wrong formula or wrong data, since it stays "
        "in float32|no=coarse kernels of the runs' dtype, since it vanishes in float32}"
    ),
    "escalated_healthy": (
        "escalated pass (float32): nothing of formula or data is wrong; at most {ratio:.2f} × "
        "what rounding makes, at {site} (limit {limit:.1f})"
    ),
    # within rounding
    "largest": "{typical}; any token's {ratio:.2f} ×, at {site} (limit {limit:.2g})",
    "typical_largest": (
        "the typical token's error is at most {ratio:.2f} × what rounding makes, at {site} "
        "({phase}; limit {limit:.2g})"
    ),
    "typical_equal": "the typical token is equal bit for bit at every site",
    "judged_against": (
        "against {floor:yes=the measured float64 error of one side|no=the truth}: {num_judged} "
        "sites judged, none beyond a limit; the nearest to one is {site} ({phase}), at "
        "{limit_usage:.0%} of it"
    ),
    "equally_near": (
        "{site} ({phase}): the sides differ by {ratio:.1f} × the rounding model, and are equally "
        "near the truth: legitimate"
    ),
    "not_kept": "of some tensors only digests or statistics were kept",
    "floor_beyond": "a --floor run is beyond the limits itself",
    "coarser": (
        "; {side:letter}'s arithmetic is {times:.1f} × as coarse as {other:letter}'s, by the "
        "median of the blocks"
    ),
    "farther_everywhere": "{side:letter} is farther from the truth in {num} of {total} blocks",
    "too_few": (
        "the truth names no side: too few numbers hold the errors at {site}, as beside a massive "
        "activation"
    ),
    "changed": (
        "; the free pass, which ran before, {scope:none=does not show it|*=shows it{scope}}: it "
        "began in between, or an earlier error takes it back there"
    ),
    "only_step": "; all of it in decode step {step}: the other forwards are equal bit for bit",
    "one_step": "all that differs is in one decode step",
    "only_in": "; all of it in {places:names}: the other blocks are equal bit for bit",
    "differs_more": "{place} differs more than the other blocks",
    "error_of_one_side": "no truth (divergence truth), but the float64 error of one side alone",
    "truth_of_full": "the truth judges only what was kept in full",
    "truth_incomplete": "the truth is incomplete",
    "truth_of_free": "the truth judges runs on their own values, not block by block",
    "no_truth": "no truth (divergence truth)",
    "truth_beside": "no truth (--truth {path})",
    "float32_takes_truth": "the float32 check takes a truth",
    "no_float32_here": ("no float32 check {ranks:yes=of several ranks|no=between two dtypes}"),
    "no_float32": "no float32 check (capture --escalate)",
    "not_in_float32": "{side:letter} was not seen in float32 (capture --escalate)",
    # the structure of a difference
    "factor": (
        "B's {update:yes=update|no=output} of {site} is {factor:.4g} × A's: one factor is "
        "{share:share} of the squared difference"
    ),
    "vocabulary_row": (
        "{share:share} of the squared difference at {site} is that of token id {number} alone"
    ),
    "channel": (
        "{share:share} of the squared difference at {site} is in channel {number} of {total} alone"
    ),
    "head": (
        "{share:share} of the squared difference at {site} is in head {number} of {total} alone"
    ),
    "shard": (
        "{share:share} of the squared difference at {site} is in "
        "{vocabulary:yes=tokens|no=channels} {first} to {last} of {total} alone: one of {num} "
        "equal parts, as a rank holds it"
    ),
    "layer_type": (
        "beyond their limit are the {num} blocks {type:odd=of odd number|even=of even number|"
        "*=of type {type}}, and no other of {total}"
    ),
    "vector": (
        "one vector, the same at all {num} tokens, is {share:share} of the squared difference at "
        "{site}[[: {times:+.3g} × {parameter}]]{cause:twice=, as where that is added twice|"
        "left_out=, as where that is left out|*=}"
    ),
    "row_constants": (
        "one constant in all channels of a token, up to {largest:.3g}, is {share:share} of the "
        "squared difference at {site}"
    ),
    "one_token": (
        "{share:share} of the squared difference at {site} is in one token of {total}: token "
        "{token} of prompt {sample}"
    ),
    "growing": (
        "the difference at {site} grows with the position[[ from token {token} on]], as what is "
        "multiplied by it ({share:share} of it)"
    ),
    "beginning": (
        "the difference at {site} begins at token {token}: {times:none=there is none before|"
        "*={times:.3g} × as large as before}"
    ),
    # drift
    "seen_in_free_run": "seen in the free run alone",
    "in_free_pass": "free pass, prompt {sample}, step {step}, {site}",
    "ends_farther": (
        "no single block is beyond its limit, but {side:letter}'s free run ends {times:figure} × "
        "as far from the truth as the other's, at {site}"
    ),
    "grows_to": (
        "no single block is beyond its limit, but the error grows to {rel_l2:.1e} at {site}, "
        "{ratio:figure} × what the blocks{behind:yes= and what follows them|no=} make together"
    ),
    "begins": (
        "; the free runs part at {site}, prompt {sample}, step {step}, which passes where it is "
        "given equal inputs"
    ),
    "grows_behind": (
        "no single block is beyond its limit, but the error grows at {site}, behind the blocks, by "
        "{ratio:figure} × what came in and rounding explain"
    ),
}
