"""The sentences of scores: one template for each code. See divergence.facts."""

SENTENCES = {
    # the verdict of a task
    "equal": "equal within {band}{differs:yes=, a difference beyond chance|no=}",
    "beyond_chance": "{verdict} beyond chance[[, by more than {band}]]",
    "few_clusters_differ": (
        "undecided within {band}: only few clusters of documents differ, as a whole and nearly all "
        "in one direction, which shows no equality"
    ),
    "no_width": "undecided: a score of {score:.3g} leaves a band of no width",
    "undecided": ("undecided within {band}: some {num_documents:,} documents would be needed"),
    "undecided_unpaired": "undecided within {band}",
    "undecided_without_count": ("undecided: nothing tells of how many documents the scores are"),
    "of_no_pairs": ", of scores as a whole, without pairs",
    "unpaired": (
        "taken as separate samples (standard error {error:.2g}), too wide where both answered "
        "the same documents[[: in pairs, with one answer in 20 changed, {paired:.2g}]]; "
        "{documents} has them"
    ),
    "no_count": (
        "[[the difference is beyond chance from {num_documents:,} documents on, taken as separate "
        "samples; ]]{documents} has the documents, in pairs"
    ),
    "band": "{relative:yes={percent:g}% of A's score (±{width:.3g})|no=±{width:g}}",
    "in_no_pair": "; {num_documents:count document} {num_documents:1=is|*=are} in no pair",
    "margins_moved": ("; margins moved by {median_shift:.2g} nats; {source} explains {limit:.2g}"),
    "no_task": "{side:letter} has no {task}",
    "not_the_same": "not the same evaluation: {reasons:list ; }",
    "scores": "{num_scores:count score}: {counts:list}",
    "num_of": "{num_scores} {verdict}",
    # what a policy asks for
    "task": "{task} is {verdict}, which the policy does not allow",
    "few_paired": (
        "{task}: {num_paired:,} of {num_documents:,} documents were paired, and the policy asks "
        "for {percent:g}%"
    ),
    # what to know beside the numbers
    "incomplete": "{side:letter}: {what}",
    "two_tools": "two tools: {reference} and {candidate}",
    "same_answers": (
        "every answer is the same{to_the_digit:yes=, with the same log-likelihoods to the last "
        "digit|no=}: the same results twice, or the same bits"
    ),
    "few_clusters": (
        "no more than {num_clusters:count cluster}: intervals of so few may be too narrow"
    ),
    "lopsided_clusters": (
        "only {num_clusters:1=1 cluster differs|*={num_clusters} clusters differ}, nearly all in "
        "one direction: interval and equality are less sure if rare clusters flip as a whole"
    ),
    # what was left out of an evaluation, or is not its whole
    "other_number": ("{task} has {num_documents:,} documents, and its results say {expected:,}"),
    "other_status": "inspect's status is {status}",
    "older_files": "{num} older files of the same tasks left out; the newest is taken",
    "samples_with_error": "{num:,} samples ended in an error, and have no score",
    "data_sets_without_details": (
        "{num:,} data sets without details (--dump-eval-details writes them)"
    ),
    "documents_without_score": ("{num:,} documents whose details say nothing of correct or score"),
    # the pairing
    "parts": "{parts:list ; }",
    "only_in": "{num:,} only in {side:letter}",
    "other_words": "{num:,} asked in other words",
    "other_answer": "{num:,} with another right answer",
    "unusable": "{num:,} without a usable score",
    "unusable_why": "{num:,} {why}",
    "duplicates": "{num:,} rows repeat a document",
    "conflicting": "{num:,} documents have two scores",
    "other_order": "another order of documents; they are paired by their identity",
    "other_clusters": (
        "{num_documents:count document} of one cluster in A and of several in B, or the reverse"
    ),
    "all_usable": "all usable",
    "scores_up_to": "scores up to {largest:g}",
    "direction": "{higher:yes=higher|no=lower} is better",
    "said": "{known:yes=said|no=not said}",
    "without_score": "without a score",
    "no_number": "the score is no number",
    "score_is": "the score is {score:g}",
    "status": "status {status}",
    "check": "{check}: {what}",
    "apart": "{reference} / {candidate}",
    # why choices flip
    "shifts_of_all": "the shifts of all documents",
    "rounding": "the rounding of {dtype}{known:yes=|no=, for want of a dtype}",
    "no_token_differs": "no token differs",
    "no_logits": "a run has no logits of it",
    "nonfinite_logits": "logits that are not finite",
    "several_tokens": "the answers have several tokens, and the runs the first",
    "no_tokenizer": "the model's tokenizer is not here",
    "begins_in_prompt": "the choice's first token begins within the prompt",
    "same_token": "both choices begin with the same token",
    "run_dtype": (
        "{side:letter}'s run is in {run_dtype}, and {side:letter} was evaluated in {dtype}"
    ),
    "run_off": (
        "{side:letter}'s run is off from {side:letter}'s own log by a median of {nats:.2g} nats: "
        "other weights, prompts or settings than were evaluated"
    ),
    # what is shown of a task
    "shown_score": (
        "{reference:fixed 4} -> {candidate:fixed 4}, difference {difference:signed}"
        "[[ ± {standard_error:.3g} (standard error)]]{higher_is_better:yes=|no=; lower is better}"
    ),
    "shown_interval": (
        "95%: {low:signed} to {high:signed}, of {num_paired:count paired document}"
        "[[ in {clusters:,} clusters]]"
        "{answers:yes=, {first:g} and {second:g} answers to each|no=}"
    ),
    "shown_interval_unpaired": (
        "95%: {low:signed} to {high:signed}, of {num_reference:,} and {num_candidate:,} documents, "
        "no pairs"
    ),
    "shown_chance": (
        "p = {p_value:chance} ({test:mcnemar=exact McNemar|permutation=permutation of signs|"
        "unpaired=two separate samples|*=t test}[[, {p_adjusted:chance} by Holm]])"
    ),
    "shown_band": (
        "{band}: {equal:yes=equal|no=not shown}, p = {p_value:chance}"
        "[[; some {needed:,} documents would settle it]]"
    ),
    "shown_can_tell": (
        "a true difference {smallest_difference:none=only beyond what such scores can have: they "
        "are too few|*=of {smallest_difference:.3g} in four of five such evaluations}"
        "[[; the narrowest band it shows is ±{shown_band:.3g}]]"
    ),
    "shown_changes": (
        "{fell:,} scores fell, {rose:,} rose[[; {num_changed:,} of {num_paired:,} answers changed]]"
    ),
    "shown_flips": (
        "{num_lost:,} lost, {num_gained:,} gained"
        "[[; {num_changed:,} of {num_paired:,} answers changed]]"
    ),
    "shown_why": (
        "{num_ties:count flip} at near ties make {difference_of_ties:signed} of the difference, "
        "{num_shifts:,} with a real shift {difference_of_shifts:signed}{verbose:yes=: a tie's "
        "margin moves by no more than {limit:.2g} nats, by {limit_of}; the median moved by "
        "{median_shift:.2g}|no=}"
    ),
    "shown_in_runs": (
        "{num:,} of {num_flips:,} flips: {num_ties:count near tie} "
        "({difference_of_ties:signed} of the difference), {num_shifts:count real shift} "
        "({difference_of_shifts:signed}){num_not_reproduced:0=|*=, {num_not_reproduced:,} not "
        "reproduced}{num_not_told:0=|*=, {num_not_told:,} not told}; a tie's margin moves by no "
        "more than {limit:.2g} nats, by {limit_of}"
    ),
    "shown_flip": (
        "prompt {sample}, token {step}: {judgement:tie=a near tie|shift=a real shift|"
        "not_reproduced=not reproduced|not_told=not told}[[, {tokens} by {reference_margin:.3g} "
        "nats in A and {candidate_margin:.3g} in B]][[: {why}]]"
    ),
    # what goes deeper
    "to_begin": "the layer where it begins",
    "on_other": "on the other machine",
    "to_layer": "the layer",
    "to_explain": "which flips these runs explain",
    "to_record": "the prompts that flipped, as a run: on A's machine, with the model's path",
}
