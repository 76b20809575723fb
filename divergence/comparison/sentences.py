"""The sentences of a comparison: one template for each code, in the order in which a comparison
asks: preflight, alignment, measuring, the decision. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

_BESIDE = (
    "{like:none=; in the other blocks {control:.2f} ×|blocks=; in the blocks {control:.2f} ×|"
    "alone=|*=, like {like} of its kind}"
)
"""What a number is held against."""

SENTENCES: Mapping[str, str] = {
    # preflight: what is known of a setting that differs
    # how a setting of one side is shown
    "preflight.num_classes": "{num} classes of module",
    "preflight.recorded": "{recorded:yes=recorded|no=not recorded}",
    "preflight.prompts": "{num} {num:plural prompt}, {num_tokens} tokens",
    "preflight.num_tokens": "{num} tokens",
    "preflight.determinism": "{deterministic:yes=deterministic|no=not deterministic}",
    "preflight.repeats": (
        "{runs:none=not measured|*={runs} runs, {num:0=all bits equal|*={num} of {total} tensors "
        "differ}}"
    ),
    "preflight.autocast": "{dtype} under autocast {autocast}",
    "preflight.computed": "{dtype} computed in {computed}",
    "preflight.batches": (
        "{num} × batch {sizes:list /}[[, in chunks of {chunk}]]{cache:yes=|no=, no cache}"
    ),
    "preflight.labels_own": "each token its own",
    "preflight.scales_migrated": "scales migrated by alpha {alpha:g}",
    "preflight.static_range": "static range of {name} {what}{num_more:0=|*= and {num_more} more}",
    "preflight.migrated_scales": (
        "migrated scales of {name} {what}{num_more:0=|*= and {num_more} more}"
    ),
    # settings
    "preflight.wider_dtype": "compared in the wider of the two",
    "preflight.framework_differs": "the framework differs too: a cause beside the machine",
    "preflight.no_kernel": "there the device has no kernel",
    "preflight.unlike_ranks": "its ranks ran on unlike machines: {machines:list}",
    "preflight.switches_otherwise": "set otherwise: {names:names}",
    "preflight.switches_refused": "refused: {names:names}",
    "preflight.nondeterministic": "nondeterministic operators: {names:names}",
    "preflight.repeats_not": "a machine does not repeat itself, first at {site}[[; {begins}]]",
    "preflight.begins": "it begins in {num} of {total} forwards: {places:names 3}",
    "preflight.completeness": "{complete:yes=complete|no=incomplete ({why:none=killed|*={why}})}",
    "preflight.only_what_both_hold": "only what both hold is compared",
    # code
    "preflight.code_differences": "{differences:names 3 ; }",
    "preflight.replaced": "{what} on {side:letter}",
    "preflight.replaced_of_torch": "{what:list ; } on {side:letter}",
    "preflight.wrapped": "{name}: {what}, on {side:letter}",
    "preflight.attribute": (
        "{name}.{key} {reference} / {candidate}[[ in {where}]][[ in {num} modules]]"
    ),
    "preflight.attribute_changed": (
        "{name}.{key} changed while running, on {side:letter}, while prompt {sample} ran"
    ),
    "preflight.compiled": (
        "{name}: {reference:none=not compiled|*={reference}} on A, "
        "{candidate:none=not compiled|*={candidate}} on B"
    ),
    "preflight.other_code": (
        "{name}: other code of {functions:none=forward|*={functions:list}}[[ in {where:list}]]"
        "[[ (replaced in both: {replaced})]]"
    ),
    "preflight.class_alone": (
        "{name} ({origin}) only on {side:letter}[[ in place of {instead:list}]][[ ({how:list ; })]]"
    ),
    "preflight.version": "{name} {reference} / {candidate}",
    "preflight.few_codes": "{differences:list ; }[[ ({versions:list})]]",
    "preflight.many_codes": "other code in {num} classes[[ ({versions:list})]]: {names:names 3}",
    # configuration
    "preflight.config_differences": "{differences:names 6 ; }",
    "preflight.config_value": (
        "{key} {reference}[[ ({reference_place})]] / {candidate}[[ ({candidate_place})]]"
        "[[ ({place}, there {other_place})]]"
    ),
    "preflight.config_only": "only in {side:letter}: {shown:names 6}",
    "preflight.moved_keys": "the same values, {num} of them under other keys",
    "preflight.config_not_recorded": "in what is not recorded of it",
    # pictures and sound
    "preflight.media": "{num} {num:plural file}, {digest}",
    "preflight.media_differ": (
        "{names:list} of prompt {sample}{num_more:0=|*= (and of {num_more} more)} differ: {cause}"
    ),
    "preflight.media_files": (
        "other files: {reference:none=none|*={reference:list}} / "
        "{candidate:none=none|*={candidate:list}}"
    ),
    "preflight.media_settings": "the same files, another processor: {differences:names 6 ; }",
    "preflight.media_arithmetic": (
        "the same files and settings: another version of the processor, another backend, or this "
        "machine's kernels"
    ),
    # inputs of steps of one's own
    "preflight.inputs": "{num} {num:plural tensor}, {digest}",
    "preflight.inputs_differ": (
        "step {sample}{num_more:0=|*= (and {num_more} more)} was given "
        "{rounded:yes=the same but for rounding|no=something else}: {names:list}"
    ),
    # tensors that modules made
    "preflight.weights_changed": (
        "{side:none=changed on both sides|*=changed on {side:letter} alone}, not alike from step "
        "{sample} on"
    ),
    "preflight.weights_stayed": "{changed:yes=changed between steps|no=as they were}",
    "preflight.derived": "{names:names}: {how}",
    "preflight.derived_changed": (
        "changed while running, {side:none=on both sides, at different prompts|*=on {side:letter}, "
        "while prompt {sample} ran}"
    ),
    "preflight.derived_dtypes": "{reference} / {candidate}, equal values but for rounding",
    "preflight.derived_behind": "other values behind the first {num}",
    "preflight.derived_constant": "{side:letter}'s is {value:g} from index {first} on",
    "preflight.derived_values": "from index {first} on {reference:.6g} / {candidate:.6g}",
    "preflight.strides": (
        "{reference:none=contiguous|*=strides {reference:list}} / "
        "{candidate:none=contiguous|*=strides {candidate:list}}"
    ),
    "preflight.tied_equal": "{names:list  and } are one tensor on {side:letter} alone",
    # parameters by name
    "preflight.prefix_read": (
        "{reference:none=(nothing)|*={reference}} read as {candidate:none=(nothing)|*={candidate}}"
    ),
    "preflight.by_map": "by the name map",
    "preflight.left_over": "{num} only in {side:letter}: {names:names 2}",
    "preflight.told_differ": ("{num} of {total} parameters that both tell differ: {names:names 2}"),
    "preflight.told_equal": (
        "{num:0=none can be told|*=the {num} parameters that both tell are equal}: not every "
        "engine tells its weights"
    ),
    # weights
    "preflight.missing": (
        "{num} parameters were missing from the checkpoint and are random: {names:names 2}"
    ),
    "preflight.codes_against": "{reference} against {candidate}: not the same model",
    "preflight.rounded": "the same weights, rounded from {wide} to {narrow}",
    "preflight.other_parameters": "other parameters: {matching:list ; }",
    "preflight.other_names": "the same values under other names: {matching:list ; }",
    "preflight.other_weights": "other weights",
    "preflight.digests_of_other_names": "digests of other names and dtypes cannot be compared",
    "preflight.digests_of_dtypes": "digests of different dtypes cannot be compared",
    "preflight.other_after_rounding": "other weights, also after rounding to one dtype",
    "preflight.offloaded": "{num} offloaded parameters were not digested",
    "preflight.undigested": (
        "whether both have the same weights is not known: a side's digests are not recorded"
    ),
    "preflight.model_and_suite": (
        "{a_is_suite:yes=B is a run of a model, and A|*=A is a run of a model, and B} of operators "
        "alone"
    ),
    "preflight.no_digests": "the parameters' digests are not recorded",
    "preflight.parameters_differ": "{num} of {total} parameters differ: {names:names 3}",
    "preflight.dequantized": (
        "the codes and scales are equal, and {num} of {total} modules are dequantised to other "
        "weights: {names:names}"
    ),
    # how weights that are not equal belong together
    "preflight.relations": "{relations:names 4 ; }",
    "preflight.relation": "{names:names 2}: {apart:none=|*=about {apart:list  to } apart}[[{how}]]",
    "preflight.initialised": "freshly initialised on {side:letter}, whose checkpoint lacks it",
    "preflight.tied_alone": "the same values as {key} on {side:letter} alone, as of tied weights",
    "preflight.shapes": "{reference:lengths} / {candidate:lengths}",
    "preflight.values_in_dtypes": "{reference} / {candidate}, equal values",
    "preflight.rounded_to": "{side:letter} = {other:letter} rounded to {form}",
    "preflight.all_zeros": "all zeros on {side:letter}",
    "preflight.dtypes_apart": "{reference} / {candidate}, as far apart as their rounding",
    "preflight.rows_moved": "the same rows in another order",
    "preflight.columns_moved": "the same columns in another order",
    "preflight.moved": "A's {key} is there",
    "preflight.turned": "transposed",
    "preflight.nonfinite": "{num:,} {num:plural number} on {side:letter} not finite",
    "preflight.shifted": "B = A + {constant:.3g}",
    "preflight.scaled": "B = {factor:.6g} x A",
    "preflight.as_quantised": ", as after quantising ({steps:list})",
    "preflight.one_step": "{side:letter}'s numbers are multiples of one step",
    "preflight.as_trained": ", as after training further",
    "preflight.as_merged": (
        ", {dtype:none=nearer than sums of them tell|*=no more than rounding to {dtype} makes}: "
        "merged or rounded in another order, or trained further"
    ),
    # guesses at a cause
    "preflight.adapters": (
        "{side:letter} holds {num} adapter weights ({adapter}{merged:yes=|no=, not merged})"
    ),
    "preflight.vocabulary": (
        "{size:none=another vocabulary, or one padded otherwise|*=the vocabulary of {size:,} "
        "tokens is padded otherwise}: {reference:,} rows of the {what:embedding=embedding|"
        "head=output matrix} / {candidate:,}"
    ),
    "preflight.tied": "{names:list  and } are tied on {side:letter}, and differ on {other:letter}",
    "preflight.one_layer": "all of them in {module}: as after training this layer further",
    "preflight.one_kind": "only {names:list}, in every block: as after merging an adapter",
    # tokenizers, templates, prompts
    "preflight.same_example": "the same text for a short conversation",
    "preflight.rendered": "rendered text differs {place}",
    "preflight.texts_from": "from character {character} on: {reference} against {candidate}",
    "preflight.tokenizer_sizes": "{reference:,} tokens / {candidate:,}",
    "preflight.tokenizer_rules": "{size:,} tokens on both sides: other texts, merges or rules",
    "preflight.number_of_prompts": "{reference} prompts against {candidate}",
    "preflight.prompt_differs": (
        "prompt {sample} differs from token {token} on: {edit:none={reference:squared} against "
        "{candidate:squared}|*={edit}}[[{text}]]"
    ),
    "preflight.text_cause": (
        " (the text is the same{edit:yes=: one side's tokenizer adds tokens to it|no=, so the "
        "tokenizers differ})"
    ),
    "preflight.texts_differ": " (their texts differ {place})",
    "preflight.prompts_of_numbers": "the {what} differ: {reference} against {candidate}",
    "preflight.prompts_differ": "the prompts differ",
    "preflight.edited": "the {what} differ; prompt {sample}: {edit}",
    "preflight.parting": (
        "the {what} differ; prompt {sample} parts at token {token}: {reference:squared} / "
        "{candidate:squared}"
    ),
    "preflight.begins_twice": "{side:letter} begins with token {token} twice, {other:letter} once",
    "preflight.has_more": (
        "{place:begin={side:letter} begins with {tokens}, which {other:letter} lacks|"
        "end={side:letter} ends with {tokens}, which {other:letter} lacks|"
        "*=from token {place} on {side:letter} has more: {tokens}}"
    ),
    "preflight.tokens": "{num:1=token {ids:list}|*={num} tokens, {ids:squared}}",
    "preflight.labels": (
        "prompt {sample}, token {token}: label {reference:none=none|*={reference}} against "
        "{candidate:none=none|*={candidate}}"
    ),
    "preflight.tokens_untold": "a side does not tell the tokens it was fed",
    # tokens that were fed
    "preflight.forced": "forced to the recorded tokens",
    "preflight.fed_as_told": "as far as both sides tell what they were fed",
    "preflight.forced_padding": "forced; padding follows where a prompt ended before its batch",
    "preflight.other_tokens": "other tokens on each side",
    # compared all the same, or stopped
    "preflight.other": "other {checks:list  and other }",
    "preflight.and": "; {what}",
    "preflight.blocking": ("{check}: {details:none={reference} against {candidate}|*={details}}"),
    # two truths
    "preflight.truths_apart": (
        "{site} (prompt {sample}, step {step}) differs by {rel_l2:.2e}, and two float64 runs of "
        "one code by at most {limit:.0e}"
    ),
    # alignment: why a tensor has no partner, or is judged elsewhere
    # no partner
    "align.no_partner": "no partner",
    "align.pass_without_partner": "pass without a partner",
    "align.prompt_ended": (
        "in {side:letter} prompt {sample} ended after {num_tokens} {num_tokens:plural token}"
    ),
    "align.parts_make_none": "in {side:letter} {reason}",
    "align.not_in_pass": "not in B's {pass_} pass",
    "align.unaccounted": "unaccounted for: a fault of this tool",
    "align.replay_has_operators_alone": "a replay holds operators alone",
    "align.no_whole_pass": "B has no whole pass there",
    "align.no_such_pass": "B has no {pass_} pass{other_inputs:yes= to the same inputs|no=}",
    "align.other_escalated_inputs": (
        "the two escalated passes had other inputs; a truth (--truth) judges each by itself"
    ),
    "align.no_anchored_operators": (
        "operators are compared where blocks had equal inputs, and B has no such pass"
    ),
    "align.no_operator_of": "B recorded no operator of {module} in its {pass_} pass",
    "align.operators_not_compared": "its operators were not compared",
    "align.no_such_module": "A has no module {module}",
    "align.fewer_tokens": "B generated fewer tokens",
    "align.not_in_whole": "not in the whole pass",
    "align.token_not_in_whole": "its token is not in the whole pass",
    "align.not_in_steps": "not in any decode step",
    # a partner that it cannot be compared with
    "align.other_tokens_before": (
        "after the first different token the two sides were fed different tokens"
    ),
    "align.other_weights": "the weights changed while the run was recorded, and not alike",
    "align.loss_scales": (
        "gradients of a loss times {reference:g} and times {candidate:g}; those that "
        "parameters get are compared"
    ),
    "align.shapes": "{reference:shape} against {candidate:shape}",
    "align.positions": "token positions differ: {reference:squared} and {candidate:squared}",
    "align.rows_are_no_tokens": (
        "its rows are not tokens on axis 1: {whole:squared} whole, {step:squared} in the step"
    ),
    "align.repeated_without_bytes": "{why}, and one side keeps no bytes",
    "align.rows_without_bytes": (
        "bytes or sketches of the same rows are needed, and one side keeps none"
    ),
    "align.other_digests": "digests of other dtypes or shapes tell nothing",
    "align.parts_cut_otherwise": (
        "its parts are cut otherwise on the two sides, and digests are of parts"
    ),
    "align.two_kinds_of_digests": (
        "the two sides keep digests of two kinds, of a host and of an accelerator"
    ),
    # judged elsewhere
    "align.given": "inputs that the anchored pass puts in place",
    "align.closer": "B's anchored pass got this run's own inputs instead",
    "align.by_digest": "weights, by their digests in preflight",
    "align.whole_alone": "a run's whole pass is held against its own decode steps: compare RUN",
    "align.not_widened": "integers and masks, which no pass widens",
    "align.other_calls": "computed by other operators there, judged where the two meet again",
    "align.in_anchored_pass": "operators are compared in the anchored pass",
    "align.other_text": "tokens that follow a difference continue another text",
    # how names were matched, passes that are not used
    "align.prefix": (
        "prefix {reference:none=(none)|*={reference}} → {candidate:none=(none)|*={candidate}}"
    ),
    "align.name_map": "name map",
    "align.anchored_to_others": (
        "an anchored pass was recorded, but to another run's inputs: not used"
    ),
    "align.no_source_of_replay": (
        "a replay is compared with the run whose operators it ran again, or with another replay of "
        "the same pass of that run"
    ),
    "align.whole_and_free": (
        "decode steps with the cache against one forward over the whole sequence: A is the whole "
        "pass of {run}, B its free pass, whose inputs each block got in both"
    ),
    # nothing to compare
    "align.all_skipped": "{num} {num:plural tensor} left out{alike:yes=|no=, the first}: {why}",
    "align.first_steps": "the two runs have no step in common, first {reference} and {candidate}",
    "align.first_sites": (
        "the two runs have no tensor in common: A's first is {reference}, B's {candidate}"
    ),
    "align.empty_run": "one of the runs is empty",
    # measuring: notes on runs, truths and trusted runs
    "measure.no_prefill": (
        "the prefill was not recorded: a fault there is seen only if it shows in later steps"
    ),
    "measure.truth_incomplete": (
        "the truth is incomplete ({why:none=it was cut off|*={why}}): what it does not hold is "
        "judged without it"
    ),
    "measure.truth_of_free_runs": (
        "the truth has no anchored pass to these inputs: it judges free runs alone"
    ),
    "measure.truth_judges_full": "the truth judges only what both runs keep in full",
    "measure.prefix_read": (
        "sites were matched with the prefix {reference:none=(nothing)|*={reference}} read as "
        "{candidate:none=(nothing)|*={candidate}}"
    ),
    "measure.torn_tail": "{side:letter}'s last record line was cut off and left out",
    "measure.told_to_use": (
        "{side:letter} was told to use {name} {used:None=as usual|*={used}} instead of "
        "{reference:None=as usual|*={reference}}"
    ),
    "measure.only_changed": (
        "{side:letter} stores what differs from run {run} alone, which is not at hand: of the rest "
        "digests and statistics are compared"
    ),
    "measure.rerouted": (
        "{num} of {total} tokens went to other experts on one side ({blocks:list}): "
        "rounding[[ (their router logits lay within {margin:.2g})]]; they are not judged there"
    ),
    "measure.mostly_rerouted": (
        "{num} of {total} tokens of {module} ({phase}) went to other experts"
    ),
    # what trusted runs did to the limits
    "measure.none_widened": (
        "{runs:1=the trusted run|*=the {runs} trusted runs} stayed within the limits: none was "
        "widened"
    ),
    "measure.widened": (
        "{runs:1=the trusted run|*=the {runs} trusted runs} widened the limits of {num} sites, "
        "most at {site} ({phase}), {times:.1f} times[[: from {before:.1f} to {limit:.1f} × the "
        "floor]]{beyond:yes=; one is beyond its limit there, and believed since you named it|no=}"
    ),
    # runs that are opened again for a page
    "measure.could_not_be_opened": "{run} could not be opened again: {message}",
    "measure.holds_another": "{run} holds another run now, and is left out",
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
    "weights_apart": "the weights {how}, where nothing was compared; before that ",
    "nothing_explains": "; nothing that is recorded of the two explains it",
    "nothing_differs": (
        "machine, versions, settings and code are the same: another kernel or library, or a "
        "machine that does not repeat itself"
    ),
    "side_not_known": "the {checks:list  and } of a side are not known",
    "other": "other {checks:list  and }",
    "other_explains_all": "other {checks:list  and }, which may explain everything below",
    "compared_by_force": " (compared by force: other {checks:list  and })",
    "other_codes": "other codes on the two sides",
    "codes_cost": (
        "A is {reference} and B is {candidate}: what differs is what that costs"
        "[[ ({others:list})]]{within:yes=; no block is beyond what rounding may make|no=}"
    ),
    "codes_cost_where": (
        "[[{told_by:list ; }; ]]two runs with the same codes (capture --like) tell whether a "
        "machine is wrong"
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
    "every_differs": "{off} by more than rounding, first at {site}[[{scope}]]: {cause}",
    "numbers_there": (
        "; the models hold other numbers {alike:yes=in all such blocks|*=there} "
        "({numbers:names 2 ; })"
    ),
    "family_off": (
        "{num:none=every|*={num} of {total}} {name}{before:yes=, or what lies between the block's "
        "input and it,|*=} {num:none=differs|*=differ}"
    ),
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
        "a kernel, a formula or a precision setting, not one layer; errors are as large as where "
        "products' float32 inputs keep {bits:10=10 bits (TF32)|7=7 bits (bfloat16)}"
    ),
    "cause_data": "a wrong formula or wrong data, not one layer",
    "cause_special": "what is special there?",
    "cause_optimizer": "the optimizer's step or its settings, not one layer",
    "cause_gradients": (
        "[[the product that makes it in {kind}, or what is done with it]]{kind:none=not a kernel, "
        "but what is done with gradients (adding up micro-batches, reducing among ranks, "
        "dividing)|*=}"
    ),
    "below_floor": ": within the limits of the runs' own dtype, but far above float32's",
    "every_off_below": (
        "every {name} is off, within the limits of the runs' own dtype, but far above float32's: "
        "{cause}"
    ),
    "blocks_read_table": "the blocks read this table, and an engine did not let it be replaced",
    "judged_from_free_runs": (
        "judged from free runs alone: what each block adds to the error that came in"
    ),
    "escalated_is_formula": (
        "escalated pass: it stays in float32, so it is a wrong formula or wrong data, no coarse "
        "kernel of the runs' dtype"
    ),
    "family_beyond": (
        "{num_flagged} of {total} {name} are beyond their limit, the least by {least:figure} ×"
    ),
    "family_alike": (
        "{num_flagged} of {total} {name} {num_flagged:1=is beyond its|*=are beyond their} limit, "
        "and {num} are off {unexplained:yes=by more than rounding explains|no=with it}: "
        "{least:.1f} to {most:.1f} floors"
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
        "error is {ratio:figure} × what rounding makes (limit {limit:.1f} ×, of {num_looks} "
        "forwards); over all {typical:figure} ×"
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
        "{site} ({phase}): {side:letter}'s error is {value:figure} × "
        "{other:letter}'s{in_units:yes= (each channel in its own unit)|no=}[[ ({own:.1e} / "
        "{other_error:.1e})]]"
        + _BESIDE
        + " (limit {limit:.1f} ×)[[; {estimated:letter}'s error is estimated]]"
    ),
    "forward_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s "
        "{in_units:yes=(each channel in its own unit) |no=}{step:none=in the {forward}|*=at step "
        "{step}}, prompt {sample}" + _BESIDE + " (limit {limit:.1f} ×[[, of {num_looks} forwards]])"
    ),
    "token_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s "
        "{in_units:yes=(each channel in its own unit) |no=}at "
        "{sink:yes=a sink token|no=one token} {step:none=in the {forward}|*=at step {step}}"
        + _BESIDE
        + " (limit {limit:.1f} ×)"
    ),
    "channel_off": (
        "{site} ({phase}): {side:letter}'s error is {value:figure} × {other:letter}'s in "
        "channel {channel}" + _BESIDE + " (limit {limit:.1f} ×)"
    ),
    "gain_off": (
        "{site} ({phase}): the {what} is scaled by {factor:factor} in {side:letter}[[ in prompt "
        "{sample}{step:0=|*=, step {step}}]], {value:.0f} "
        "standard deviations off the blocks of its kind (limit {limit:.0f})"
    ),
    "no_anchored_pass": (
        "B's blocks did not get A's inputs "
        "({of_a_module:yes=record(module, like=A) in Python|*=capture --like})"
    ),
    "other_may_be_finer": "by its size, {other:letter}'s error may be smaller there instead",
    "may_be_in_all": (
        "the other blocks are farther from the truth on {side:letter}, too, by {times:.2f} ×: what "
        "is wrong may be in all of them"
    ),
    "in_tail": (
        "{token:yes=other tokens lead up to it by steps of 2 × and less, as where attention is "
        "sharp|no=the other blocks are off by more than rounding, too}"
    ),
    "not_clear": "{margin:.2f} × its limit; above 2 × it would be high",
    # that only rounding differs
    "only_rounding": (
        "only rounding differs{sure:yes=|no=, as far as separate runs tell}; {numbers:none=both "
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
        "the logits ({site}) differ by one constant a row, up to {largest:.3g}, which softmax "
        "takes away[[ (KL at most {kl:.1e} nats)]]"
    ),
    "tables_turned": (
        "the rotary tables ({site}) are turned by one angle for all tokens of {samples:some "
        "prompt}[[ (positions {offsets:list} further on)]], which cancels between queries and "
        "keys"
    ),
    "taken_back": (
        "{sites:names 2}[[ (and {more} places like it)]]: the channels of the other side[[ with "
        "{signs} of {channels} signs turned]][[ in another order ({moved} of {channels} moved)]]"
        "[[ times {factor:.4g}]], and {module} takes it back: what it gives differs by rounding "
        "alone"
    ),
    "angles_round": (
        "at other positions float32 rounds the angles otherwise, by up to {rounding:.1e}; the "
        "free runs part by {rel_l2:.1e}, no more than that explains"
    ),
    "angles_round_more": "the free runs part by what rounds angles at other positions",
    "hidden_below_floor": (
        "what is smaller than this dtype's floor stays invisible {within:yes=unless made in "
        "float32|no=without an escalated pass}{next:yes=: see next|no=, which takes a B that one "
        "process runs}"
    ),
    "side_farther": (
        "in {num} of {total} blocks ({phase}) {side:letter} is farther from the truth than "
        "{other:letter}, by the median {times:.1f} ×: within the limit, but more than other "
        "kernels usually make; look at {place} first"
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
    "with_model_without_floor": "on a machine with the model; it takes no --floor",
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
    "expected_w": "B's error should be {w:figure 2} × A's",
    "measured_w": "measured {w:figure 2} × A's",
    # an analysis of somebody's package
    "analysis_failed": (
        "the analysis {name} of the package {package} failed and is left out: {error}"
    ),
}
