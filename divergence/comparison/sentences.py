"""The sentences of a comparison: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "plain": "{text}",
    "several": "{facts:list ; }",
    # what decide says of the findings together
    "nothing_judged": "nothing was judged",
    "no_analysis": "no analysis applies",
    "level": "{site} by {side:letter}",
    "levels_blame_apart": (
        "the levels blame different sides: {levels:list}. A truth made by other code than A's does "
        "that, and two faults do"
    ),
    "evidence_contradicts": "the evidence contradicts itself: {levels:list}",
    "inside": ": ",
    "inside_it": "; inside it, ",
    "behind_rank": " ({what})",
    "behind_rank_off": " (behind it {site} is off)",
    "setting": "{check} {reference} / {candidate}",
    "settings_differ": "{settings:list}{beyond:yes=; beyond that, |no=: }",
    "nothing_explains": "; nothing that is recorded of the two explains it",
    "nothing_differs": (
        "the same kind of machine, versions, settings and code, and yet other numbers: another "
        "kernel or library, or a machine that does not repeat itself"
    ),
    "side_not_known": "the {checks:list  and } of a side are not known",
    "other": "other {checks:list  and }",
    "other_explains_all": "other {checks:list  and }, which may explain everything below",
    "compared_by_force": " (compared by force: other {checks:list  and })",
    "other_codes": "other codes on the two sides",
    "codes_cost": (
        "A is {reference} and B is {candidate}: what differs is what that costs"
        "[[ ({others:list})]]{within:yes=; here no more than rounding|no=}"
    ),
    "codes_cost_where": (
        "[[{told_by:list ; }; ]]whether a machine is wrong, two runs with the same codes tell "
        "(capture --like)"
    ),
    "codes_hide_faults": "a fault would not be told from it: {what}",
    "one_run": "both are run {run}: one of them, or both, is a copy",
    "with_itself": (
        "a run compared with itself proves nothing[[, but that its ranks agree on the {num_held} "
        "tensors that several hold]]{far:yes=; it is far from the truth|no=}"
    ),
    "enlarged": (
        "{what}; each block only rounds where it is given equal inputs, so it is the model that "
        "enlarges rounding"
    ),
    "free_runs_part": "the free runs part by more than the blocks make together",
    "not_exercised": " (not exercised: {modules:names 2})",
    "unexercised_module": "{name}, {percent:.2g}% of the parameters",
    "unexercised_experts": "{size} of {of} experts of {name}",
    "unexercised_window": "{name} {size:,} (the longest sequence has {of:,} tokens)",
    "by": "[[, by {by:letter}]]{both:yes=, equally wrong on both sides|no=}",
    "some": "{numbers:some {what:step=decode step|*={what}}}{alone:yes= alone|no=} (of {total})",
    "scattered": (
        "{num} of {total} forwards alone (the first: prompt {sample}, step {step}), of no whole "
        "prompt or step"
    ),
    "rank_share": ", in the share of rank {rank}",
    "whole_pass": "decode steps with the cache against one forward over the whole sequence: ",
    # where an error is made
    "made_at": (
        "the error {seems:yes=seems to be made|no=is made} at {site:site}"
        "[[ or before it in {before}]][[, by {by:letter}]]"
    ),
    "made_elsewhere": "; {num:1=another|*=others} in {places:names 4}[[, by {by:letter}]]",
    "scope": (
        "{comma:yes=,|no=}{alone:yes=|no= seen}[[ in {parts:list  and }]]"
        "[[ from decode step {since} on]]{token:none=|*=, at token {token}}"
        "{last:yes=, at the last token of each prompt|no=}{onward:none=|*=, from token {onward} on}"
    ),
    "every_differs": "{off} by more than rounding, from {site} on[[{scope}]]: {cause}",
    "numbers_there": (
        "; the models hold other numbers {alike:yes=in all such blocks|*=there} "
        "({numbers:names 2 ; })"
    ),
    "family_off": "[[{num} of {total} {name} differ]]{num:none=every {name} differs|*=}",
    "rows_off": "{num} of {total} {what} differ",
    "rows": (
        "{what:gradients=parameters' gradients|values=parameters' new values|"
        "optimizer_gradients=gradients that the optimizer gets|*=parameters' {what}}"
    ),
    "cause_of_kind": (
        "{decode:yes=what is kept between steps, or a kernel for one token|no=a kernel, a formula "
        "or a precision setting}, not one layer"
    ),
    "cause_inputs": (
        "a kernel, a formula or a precision setting, not one layer; the errors are as large as "
        "products make them whose float32 inputs keep {bits:10=10 bits (TF32)|7=7 bits (bfloat16)}"
    ),
    "cause_special": "what is special there?",
    "cause_optimizer": "the optimizer's step or its settings, not one layer",
    "cause_gradients": (
        "[[the product that makes it in {kind}, or what is done with it]]{kind:none=not a kernel, "
        "but what is done with gradients (adding up micro-batches, reducing among ranks, "
        "dividing)|*=}"
    ),
    "below_floor": ": within the limits of the runs' own dtype, but far above float32's",
    "every_off_below": (
        "every {name} is off, within the limits of the runs' own dtype, but far above float32's: a "
        "wrong formula or wrong data, not one layer"
    ),
    "blocks_read_table": "the blocks read this table, and an engine did not let it be replaced",
    "judged_from_free_runs": (
        "judged from free runs alone: what each block adds to the error that came in, against a "
        "rounding model"
    ),
    "escalated_is_formula": (
        "escalated pass: the same inputs in float32; what coarse kernels of the runs' dtype do "
        "vanishes there, so this is a wrong formula or wrong data"
    ),
    "family_beyond": (
        "{num_flagged} of {total} {name} are beyond their limit, the least by {least:figure} ×"
    ),
    "family_alike": (
        "{num_flagged} of {total} {name} {num_flagged:1=is beyond its|*=are beyond their} limit, "
        "and {num} are off {unexplained:yes=by more than rounding, which nothing that is recorded "
        "explains|no=by the same measure}: {least:.1f} to {most:.1f} floors"
    ),
    "also_beyond": "also beyond the limit: {places:names 4}",
    "last_that_passes": "the last site before it in this block that passes: {site}",
    "prefill_passes": (
        "the prefill passes there: look at what is kept between steps (KV cache, positions, "
        "recurrent state) and at kernels for one token"
    ),
    "zero_in_reference": "{site} ({phase}): A is zero there, and B is not",
    "token_ratio": (
        "{site}: one {sink:yes=sink |no=}token's error is {ratio:figure} × what rounding makes "
        "(limit {limit:.1f} ×)[[, token {token}]]"
    ),
    "forward_ratio": (
        "{site}: in prompt {sample} ({step:none={forward}|*=step {step}}) the typical token's "
        "error is {ratio:figure} × what rounding makes (limit {limit:.1f} × for the largest of "
        "{num_looks} forwards); over all of them {typical:figure} ×"
    ),
    "typical_ratio": (
        "{site} ({phase}): the typical token's error is {ratio:figure} × what "
        "{escalated:yes=float32 |no=}rounding makes[[, in the other blocks {control:.2f} ×]] "
        "(limit {limit:.1f} ×); rel L2 {rel_l2:.2e}"
    ),
    "both_off": (
        "{site} ({phase}): [[A's error is {reference:figure} ×, B's {candidate:figure} × what "
        "rounding makes]]{reference:none=both are {value:figure} × what rounding makes away from "
        "the truth|*=} (limit {limit:.1f} ×)"
    ),
    "typical_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s"
        "{in_units:yes= (each channel in its own unit)|no=}"
        "[[ ({own:.1e} / {other_error:.1e})]]{like:none=; in the other blocks {control:.2f} ×|"
        "*=, like {like} of its kind} (limit {limit:.1f} ×)"
        "[[, {estimated:letter}'s by their difference, the other's measured]]"
    ),
    "forward_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s "
        "{in_units:yes=(each channel in its own unit) |no=}"
        "{step:none=in the {forward}|*=at step {step}}, prompt {sample}{like:none=; in the other "
        "blocks {control:.2f} ×|*=, like {like} of its kind} (limit {limit:.1f} ×"
        "[[ for the largest of {num_looks} forwards]])"
    ),
    "token_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s "
        "{in_units:yes=(each channel in its own unit) |no=}at "
        "{sink:yes=a sink token|no=one token} {step:none=in the {forward}|*=at step {step}}"
        "{like:none=; in the other blocks {control:.2f} ×|*=, like {like} of its kind} (limit "
        "{limit:.1f} ×)"
    ),
    "channel_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s in "
        "channel {channel}{like:none=; in the other blocks {control:.2f} ×|*=, like {like} of its "
        "kind} (limit {limit:.1f} ×)"
    ),
    "gain_off": (
        "{site} ({phase}): the {what} is scaled by {factor:factor} in {side:letter}[[ in prompt "
        "{sample}{step:0=|*=, step {step}}]], {value:.0f} "
        "standard deviations off the blocks of its kind (limit {limit:.0f})"
    ),
    "no_anchored_pass": (
        "no anchored pass ({of_a_module:yes=record(module, like=A) in Python|*=capture --like})"
    ),
    "other_may_be_finer": "by its size, {other:letter}'s error may be smaller there instead",
    "in_tail": ("other tokens lead up to it by steps of 2 × and less, as where attention is sharp"),
    "not_clear": "{margin:.1f} × its limit; above 2 × it would be high",
    # that only rounding differs
    "only_rounding": (
        "only rounding differs{sure:yes=|no=, as far as free runs tell}; {numbers:none=both "
        "runs compute the same model|*=the models hold other numbers ({numbers:names 2 ; }), which "
        "moves nothing here beyond rounding}"
    ),
    "differ_unmeasured": (
        "the two differ, first at {site} (step {step}), but by how much is not known: only digests "
        "or statistics of it were kept"
    ),
    "nothing_rounds": (
        "{within:yes=they|no=the runs} differ, but nothing that rounds was compared"
    ),
    "most_not_compared": ("most was not compared: {why}; what was differs by rounding alone"),
    # what differs and no output depends on
    "no_output_depends": "; {what:list ; }",
    "rest_is_equal": "all else is equal bit for bit",
    "logits_shifted": (
        "the logits ({site}) differ by one constant a row, up to {largest:.3g}: softmax takes it "
        "away, and no probability depends on it[[ (KL at most {kl:.1e} nats)]]"
    ),
    "tables_turned": (
        "the rotary tables ({site}) are turned by one angle for all tokens of {samples:some prompt}"
        "[[ (positions {offsets:list} further on)]]: it cancels between queries and keys, and "
        "nothing that follows depends on it"
    ),
    "taken_back": (
        "{sites:names 2}[[ (and {more} places like it)]]: the channels of the other side[[ with "
        "{signs} of {channels} signs turned]][[ in another order ({moved} of {channels} moved)]]"
        "[[ times {factor:.4g}]], and {module} takes it back: what it gives differs by rounding "
        "alone"
    ),
    "angles_round": (
        "at other positions float32 rounds the angles otherwise, by up to {rounding:.1e}, and the "
        "free runs part by {rel_l2:.1e}: no more than that makes of them"
    ),
    "angles_round_more": "the free runs part by what rounds angles at other positions",
    "hidden_below_floor": (
        "what is smaller than this dtype's floor stays invisible {within:yes=unless made in "
        "float32|no=without an escalated pass}{next:yes=: see next|no=, which takes a B that one "
        "process runs}"
    ),
    "side_farther": (
        "in all blocks ({phase}) {side:letter} is {times:.1f} × as far from the truth as "
        "{other:letter}: within the limit, and more than other kernels usually make; {place} is as "
        "good a place to look as any"
    ),
    "stands_out": (
        "{site} ({phase}) differs {times:.1f} × more than others of its kind (rel L2 "
        "{rel_l2:.1e}), within rounding: the first place to look"
    ),
    "made_between": (
        "the error {seems:yes=seems to be made|no=is made} between [[blocks, at {num} of {total} "
        "places, from ]]{first} and {then}{num:none=|*= on}[[, by {by:letter}]]{outside:yes=: "
        "outside the modules, which pass|no=}"
    ),
    # commands
    "on_machine": "on {side:letter}'s machine",
    "with_model": "on a machine with the model",
    "all_positions": "on A's machine: its prompts, all token positions",
    "shown_without_model": "a script that shows it without the model",
    "with_references_model": ("on B's machine, with A's model (--model PATH if it lies elsewhere)"),
    "measure_all_the_same": "measure all the same",
    "truth_judges_two": "a truth judges two runs, RUN being the one that it repeats",
    # comparison.arithmetic: what two machines' arithmetic explains
    "more_arithmetic": "{num_more} more differences of arithmetic; inspect -v lists a run's facts",
    "num_probed": "{num:0=not probed|*={num:count fact}}",
    "no_common_fact": "no fact that both runs hold",
    "arithmetic_is_same": (
        "the probed arithmetic is the same on both sides ({num:count fact}"
        "[[; {num_unsure} more not verified]])"
    ),
    "num_held": "{total:none={num:count fact}|*={num} of {total} facts}",
    "num_differ": (
        "{num_differ} of {num:count fact} differ, {num_precise:none=none in precision: harmless|"
        "*={num_precise} in precision: {worst}}"
    ),
    "num_of_probe": "{probe} ({num})",
    "not_verified": "{num_unsure} not verified",
    "probes_differ": "{kinds:list}[[; {num_unsure} not verified]]",
    "arithmetic_differs": "{where:names 2}: {what}",
    "answers": (
        "{probe:accumulator=partial sums of |subnormals=subnormal numbers |rounding=rounding |*=}"
        "{reference} in A, {candidate} in B"
    ),
    "answer": (
        "{value:fused=fused multiply-adds|rounded products=products rounded before they are added"
        "|exact products, fused=exact products, several added at once|*={value}}"
    ),
    "keeps": ("{coarse:letter} keeps {low} of its float32 inputs, {fine:letter} {high}"),
    "other_bits": "other bits; {subject}: {most}",
    "ulp_at_worst": "{reference_ulp:.3g} ulp at worst in A, {candidate_ulp:.3g} in B",
    "order_differs": (
        "{where:names 2}: {same:yes=both add as {reference}, but other terms stand together|"
        "no=A adds {reference}, B {candidate}}[[: {ws:list}]]"
        "[[, most of it from storing in {stored_in}]]"
    ),
    "expected_w": "expected W {w:figure 2}",
    "measured_w": "measured W {w:figure 2}",
    # an analysis of somebody's package
    "analysis_failed": (
        "the analysis {name} of the package {package} failed and is left out: {error}"
    ),
}
