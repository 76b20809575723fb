"""The sentences of log-probabilities: one template for each code. See divergence.facts."""

SENTENCES = {
    # what decides
    "nonfinite": (
        "nan or inf in {num_tokens:count token} of {side:both=both sides|*={side:letter}} where "
        "the other side has a number"
    ),
    "not_likeliest": (
        "{side:letter} does not choose the likeliest token of its own list ({num_times:count time}"
        "[[, by at most {nats:decimal} nats]])"
    ),
    "choice_moved": ": it samples, or a penalty or a bias moves its choice",
    "expert": (
        "the {num_tokens:count token} sent to expert {expert} of {module} differ by {mean:decimal} "
        "nats, the others by {rest:decimal}"
    ),
    "too_few_prompts": (
        "mean |Δ log p| {mean:decimal} nats, {far:yes=far |no=}more than the {explained:decimal} "
        "({source}) that rounding explains; of what kind, {num_prompts:count prompt} do not tell"
    ),
    "odd_prompts": (
        "{num_odd:count prompt} of {num_prompts} {num_odd:1=stands|*=stand} out ({samples:names}); "
        "the others differ by {rest:decimal} nats[[, {num_beyond} of them beyond rounding by "
        "themselves]]"
    ),
    "odd_tokens": (
        "{num_odd:count token} of {num_tokens:,} hold most of the difference; the others differ by "
        "{rest:decimal} nats"
    ),
    "odd_places": (
        "{last:yes=the last tokens|no=the tokens {places:names 5} (counted from 0)} of all answers "
        "stand out; the others differ by {rest:decimal} nats"
    ),
    "perhaps_rerouted": "{what}; {cause}",
    "hides_experts": "{what}, and {cause}",
    "rerouted": (
        "rounding sends a token to another expert where their scores nearly tie, and an expert's "
        "fault looks the same{known:yes=|no=; no side tells whether the model has experts}. Runs "
        "with layers (--layers RUN) tell them apart"
    ),
    "growing": (
        "the difference grows with the answer, {times:.1f} times from its first third to its last, "
        "as a wrong state makes it (cache, positions)"
    ),
    "shifted": (
        "mean |Δ log p| {mean:decimal} nats, {direction}[[{spread}]]: {setting:none=another model, "
        "temperature or prompt, no precision|*={setting}}"
    ),
    "everywhere": (
        "mean |Δ log p| {mean:decimal} nats{spread:none= in all prompts alike|*={spread}}, both "
        "ways, more than the {explained:decimal} ({source}) that rounding explains: {setting:none="
        "another quantisation or precision, or other weights somewhere|*={setting}}"
    ),
    "farther": "farther than any precision in use",
    "one_way": "B {nats:decimal} nats {way} A",
    "spread": (
        " (beyond rounding in {num_beyond} of {num_prompts} prompts[[, all of them {order} than "
        "the others]])"
    ),
    "equal": ("all log-probabilities {partial:yes=that both sides tell|no=and tokens} are equal"),
    "within": (
        "mean |Δ log p| {mean:decimal} nats, no more than the {explained:decimal} ({source}) that "
        "rounding explains"
    ),
    "parted_at_ties": "; {num_prompts:count prompt} parted at ties",
    "parted_untold": "; {num_prompts:count prompt} parted, and whether at ties is not told",
    "ended": (
        "; {num_answers:count answer} end earlier on {side:none=one side|*={side:letter}}[[, by "
        "{each} each]]"
    ),
    "tokens": "{num_tokens:1=one token|*={num_tokens} tokens}",
    "counted_once_more": (
        "{side:letter} counts one token more in {num_answers} of {num_total:count answer}"
        "{shorter:yes=, all but the longest|no=}: id {token} each, a pad or the token that ends; "
        "the others differ by {mean:decimal} nats"
    ),
    "but": "; but {doubt}",
    "other_answers": (
        "the trainer scored other tokens than were sampled, in {num_flips} of "
        "{num_answers:count answer}"
    ),
    "parted": (
        "the answers to {num_prompts:count prompt} part at a margin that rounding {experts:yes="
        "flips only where it sends a token to other experts|no=does not flip}"
    ),
    "texts": (
        "no token has a log-probability on both sides{num_ties:0=|*= after equal text}; "
        "{num_same} of {num_answers:count answer} are the same text{num_ties:0=|*=; {num_ties} "
        "of them part at ties}[[; so at least {least_share:.0%} of such prompts are, 99% "
        "surely]]. Drawn answers (--answers 10, both sides) tell whether they part by chance"
    ),
    "layers_explain": "; {module} explains it ({share:.0%} of Δ log p)",
    "not_asked_the_same": "the two were not asked the same: {what}",
    # what rounding explains
    "dtype": "{dtype}",
    "no_dtype": "bfloat16, for want of a side's dtype",
    "floor_runs": "the {num_runs:1=floor run|*={num_runs} floor runs}",
    "far_floor_runs": (
        "the {num_runs:1=floor run|*={num_runs} floor runs}, farther off than any precision in use"
    ),
    # what a verdict lacks
    "not_covered": "not every token was scored by both sides",
    "prompts_needed": "{num_prompts:count prompt}, and {least} are needed",
    "scale_without_dtype": "a side's dtype is not known: no more than bfloat16 explains",
    "scale_from": "rounding is taken from {source}",
    "texts_alone": "texts alone",
    "experts_move": (
        "rounding moves tokens farther where it sends them to other experts{known:yes=|no=, and "
        "whether the model has any no side tells}"
    ),
    "within_widest": (
        "no more than bfloat16 makes{floor:yes= on another machine than the floor run's|no=}, of "
        "most tokens at least"
    ),
    "dtype_not_known": "a side's dtype is not known",
    "by": "by {source}",
    "doubts": "{doubts:list ; }",
    "rounding_both_ways": "B is {nats:decimal} nats {way} A, and rounding goes both ways",
    "answers_beyond": "beyond it: the answers by themselves, by {nats:decimal} nats",
    "prompts_beyond": "beyond it by itself: {num_prompts:count prompt}",
    "tokens_far_beyond": "far beyond it: {num_tokens:count token}, of up to {largest:decimal} nats",
    "only_tokens": (
        "it is in {num_tokens:count token} alone, of up to {largest:decimal} nats: all others are "
        "equal"
    ),
    "ties_not_known": "not known to be ties: {num_answers:count answer} that parted",
    "ends_not_known": (
        "ended earlier on one side, by how little nobody told: {num_answers:count answer}"
    ),
    "scores_not_known": "not told on both sides: {num_tokens:count token} of the answers",
    # what a setting makes
    "temperature": (
        "{side:candidate=B's log-probabilities are A's|reference=A's log-probabilities are B's} at "
        "temperature {temperature:.3g}[[, renormalised over {rule} {value:.3g}]] (fitted over "
        "{num_tokens:count listed token})"
    ),
    "kept": (
        "{side:candidate=B's log-probabilities are A's|reference=A's log-probabilities are B's} "
        "renormalised over {rule} {value:.3g} (fitted over {num_tokens:count token})"
    ),
    "factor": "{side:letter}'s log-probabilities are {factor:.3g} times the other side's",
    "base": "{side:letter}'s log-probabilities are logarithms of base {base}, not natural ones",
    "per_length": (
        "{side:letter}'s log-probabilities are divided by the length of their answer once too often"
    ),
    "summed": "each of {side:letter}'s log-probabilities is the sum of all up to its token",
    "repeated": (
        "B's rows stand at other prompts, {num_moved} of {num_prompts:count prompt}: prompt "
        "{sample} has the log-probabilities of A's prompt {other}"
    ),
    "beside": (
        "B's log-probabilities stand {step:1=one token too early|*=one token too late}: each is "
        "A's of the token {step:1=behind|*=before}"
    ),
    "permuted": (
        "B's rows are in another order, {num_moved} of {num_prompts:count prompt}: prompt {sample} "
        "has the log-probabilities of A's prompt {other}"
    ),
    "other_token": (
        "{side:letter}'s log-probabilities are of another token, {which:likeliest=the likeliest "
        "one|before=the one before it|behind=the one behind it|id above=that of the next id|"
        "id below=that of the id before}, by the other side's {num_tokens:count list}"
    ),
    "not_listed": (
        "{side:letter}'s log-probabilities are of other tokens: its own {num_tokens:count list} "
        "tell those of its tokens, as the other side does"
    ),
    "remain": (
        "; after that {mean:decimal} nats remain, {within:yes=within rounding|no=more than the "
        "{explained:decimal} ({source}) that rounding explains}"
    ),
    "goes_with_size": (
        "Δ goes with log p (R² {share:.0%}), as another temperature makes it[[: B = A at a "
        "temperature of at {bound} {temperature:.2g}; one side's likeliest tokens would tell it]]"
    ),
    "renormalised": (
        "{side:letter}'s are higher in {num_higher} of {num_tokens:count token}, by {nats:.2g} "
        "nats and {most:.2g} at most, as where {side:letter} leaves out the unlikely tokens "
        "(top-p, top-k, min-p) and what it keeps held {kept:.0%}"
    ),
    # answers that were drawn
    "repeats": (
        "{side:both=both sides give|*={side:letter} gives} one answer to each prompt, as often as "
        "it is asked"
    ),
    "ignores_temperature": "; {repeats}: it may not obey the temperature",
    "not_drawn": (
        "{repeats}: temperature or seed are not obeyed, or nothing else is likely, so they tell "
        "no distribution"
    ),
    "few_drawn": ("{num_answers:count drawn answer} are too few for a test of their distribution"),
    "more_answers": "--answers 10, more prompts",
    "test": (
        "{num_answers} answers to {num_prompts:count prompt} each side: MMD² {mmd:decimal}, p = "
        "{p_value:.2g} by permutation"
    ),
    "other_distribution": (
        "the answers are of another distribution ({test}): another model, quantisation, template "
        "or sampling"
    ),
    "texts_blur_cause": (
        "texts do not tell a precision from another model, or from another sampling setting"
    ),
    "no_difference": (
        "no difference is seen ({test}); so many answers would show {share:none=not even another "
        "model|*=another model in {share:.0%} of the answers}"
    ),
    "power_of_test": "texts alone: a test sees no more than its power",
    # the numbers
    "delta": (
        "Δ log p of {num_tokens:count equal token}: mean {mean:decimal}, p99 of |Δ| "
        "{p99_abs:decimal}, max {max_abs:decimal} nats"
    ),
    "kl": (
        "KL(A‖B) at least {kl_lower:decimal} nats, {kl_upper:none=no upper bound|*=at most "
        "{kl_upper:decimal}}; {tail:.1%} of the probability is on neither common list"
    ),
    "first_parting": (
        "the answers to {num_flips:count prompt} part, first {first_fault:yes=at no tie "
        "|no=}prompt {sample} at token {token} ({margin}{judgement:tie=: a tie|fault=: no "
        "tie|none=}); the {num_after:count token} after were not compared"
    ),
    "margin": "{nats:none=no list holds both|*={nats:decimal} nats between them}",
    "margin_by_list": "one side's list goes that far down without the other's token",
    "shift": (
        "over {num_prompts} prompts the mean shift is {mean:decimal} nats, 99% between "
        "{low:decimal} and {high:decimal} (p = {p_value:.2g}); the smallest that shows is "
        "{smallest_shift:decimal}"
    ),
    "few_prompts": "{num_prompts:count prompt}: too few for an interval or a p value",
    "rounding_not_known": (
        "what rounding makes is not known, since a side's dtype is not; --floor RUN, of a "
        "trusted machine on the same prompts, tells it"
    ),
    "rollout_normal": "every number that trainers watch is normal by its own limit",
    "rollout_off": "{framework}'s {name} is {value:.4g}, normal {normal}",
    "layers_show": (
        "the layer-level runs show {share:.0%} of Δ log p ({num_tokens:,} tokens): {what}"
    ),
    "not_in_layers": (
        "what differs is not in what they ran (another build, other weights or settings)"
    ),
    # the numbers, as they are shown
    "shown_mean_abs": (
        "{mean_abs:decimal} nats; rounding explains {explained:decimal} ({explained_by})"
    ),
    "shown_mean": "{mean:decimal} nats, B less A",
    "shown_quantiles": (
        "p50 {median_abs:decimal}, p90 {p90_abs:decimal}, p99 {p99_abs:decimal}, max "
        "{max_abs:decimal}, of {num_tokens:count token}"
    ),
    "shown_layers": "{share:.0%} of Δ log p; they are {kind}[[, {block}]]",
    "shown_texts": (
        "{mmd:decimal}; {num_answers:,} drawn answers each, {p_value:none=no test|*=p = "
        "{p_value:.2g} of one distribution}"
    ),
    "shown_kl": (
        "{kl_lower:decimal} to {kl_upper:none=unbounded|*={kl_upper:decimal}} nats, over common "
        "top lists; {tail:.2%} of the probability is outside"
    ),
    "shown_kl_quantiles": (
        "p50 {kl_median:decimal}, p99 {kl_p99:decimal}, max {kl_max:decimal}, of its lower bound"
    ),
    "shown_same_top": "{same_top:.2%} of tokens have the same likeliest one",
    "shown_total_variation": "{tv_lower:decimal} to {tv_upper:decimal}",
    "shown_delta_p": (
        "mean {delta_p_mean:+.3%}, RMS {delta_p_rms:.3%}, 1% {delta_p_p1:+.2%}, 99% "
        "{delta_p_p99:+.2%}"
    ),
    "shown_perplexity": (
        "{reference:.5g} -> {candidate:.5g}; ln ratio {ln_ratio:+.3g} ± {ln_ratio_error:decimal}"
        "[[, correlation {ln_correlation:.2%}]]"
    ),
    # what the two sides are
    "num_prompts": "{num_prompts} prompts",
    "num_tokens": "{num_tokens} tokens",
    "only_number": "their number",
    "other_order": (
        "the same prompts, in another order: A's prompt {sample} is B's prompt {place}; write both "
        "in one order"
    ),
    "other_text": "prompt {sample} is another text",
    "other_length": (
        "prompt {sample} had {reference} tokens in A, {candidate} in B: another chat template or "
        "tokenizer"
    ),
    "other_tokens": (
        "prompt {sample} differs from token {token} on: [{reference:list}] against "
        "[{candidate:list}]: another chat template or tokenizer, or another prompt"
    ),
    "drawn_and_greedy": "one side's answers were drawn, the other's are greedy",
    "against": "{reference} against {candidate}",
    "check": "{check}: {what}",
    "answers_as": ("{side:letter}: {model} was asked for, and the server answers as {answers_as}"),
    "side_lacks": "{side:letter}: {what}",
    "by_text": "{side:letter} tells tokens by text alone: ids were matched by text",
    "no_layer": (
        "neither side recorded layers: `divergence capture` of the models tells where the "
        "difference is made"
    ),
}
