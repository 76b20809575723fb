"""The sentences of alignment: why a tensor has no partner, or is judged elsewhere. See
divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # no partner
    "no_partner": "no partner",
    "pass_without_partner": "pass without a partner",
    "prompt_ended": (
        "in {side:letter} prompt {sample} ended after {num_tokens} {num_tokens:plural token}"
    ),
    "parts_make_none": "in {side:letter} {reason}",
    "not_in_pass": "not in B's {pass_} pass",
    "unaccounted": "unaccounted for: a fault of this tool",
    "replay_has_operators_alone": "a replay holds operators alone",
    "no_whole_pass": "B has no whole pass there",
    "no_such_pass": "B has no {pass_} pass{other_inputs:yes= to the same inputs|no=}",
    "other_escalated_inputs": (
        "the two escalated passes had other inputs; a truth (--truth) judges each by itself"
    ),
    "no_anchored_operators": (
        "operators are compared where blocks had equal inputs, and B has no such pass"
    ),
    "no_operator_of": "B recorded no operator of {module} in its {pass_} pass",
    "operators_not_compared": "its operators were not compared",
    "no_such_module": "A has no module {module}",
    "fewer_tokens": "B generated fewer tokens",
    "not_in_whole": "not in the whole pass",
    "token_not_in_whole": "its token is not in the whole pass",
    "not_in_steps": "not in any decode step",
    # a partner that it cannot be compared with
    "other_tokens_before": (
        "after the first different token the two sides were fed different tokens"
    ),
    "loss_scales": (
        "gradients of a loss times {reference:g} and times {candidate:g}; those that "
        "parameters get are compared"
    ),
    "shapes": "{reference:shape} against {candidate:shape}",
    "positions": "token positions differ: {reference:squared} and {candidate:squared}",
    "rows_are_no_tokens": (
        "its rows are not tokens on axis 1: {whole:squared} whole, {step:squared} in the step"
    ),
    "repeated_without_bytes": "{why}, and one side keeps no bytes",
    "rows_without_bytes": "bytes or sketches of the same rows are needed, and one side keeps none",
    "other_digests": "digests of other dtypes or shapes tell nothing",
    "parts_cut_otherwise": (
        "its parts are cut otherwise on the two sides, and digests are of parts"
    ),
    "two_kinds_of_digests": (
        "the two sides keep digests of two kinds, of a host and of an accelerator"
    ),
    # judged elsewhere
    "given": "inputs that the anchored pass puts in place",
    "closer": "B's anchored pass got this run's own inputs instead",
    "by_digest": "weights, by their digests in preflight",
    "whole_alone": "a run's whole pass is held against its own decode steps: compare RUN",
    "not_widened": "integers and masks, which no pass widens",
    "other_calls": "computed by other operators there, judged where the two meet again",
    "in_anchored_pass": "operators are compared in the anchored pass",
    "other_text": "tokens that follow a difference continue another text",
    # how names were matched, passes that are not used
    "prefix": (
        "prefix {reference:none=(none)|*={reference}} → {candidate:none=(none)|*={candidate}}"
    ),
    "name_map": "name map",
    "anchored_to_others": "an anchored pass was recorded, but to another run's inputs: not used",
    "no_source_of_replay": (
        "a replay is compared with the run whose operators it ran again, or with another replay of "
        "the same pass of that run"
    ),
    "whole_and_free": (
        "decode steps with the cache against one forward over the whole sequence: A is the whole "
        "pass of {run}, B its free pass, whose inputs each block got in both"
    ),
    # nothing to compare
    "all_skipped": "{num} were skipped, the first because: {why}",
    "first_sites": (
        "the first sites are {reference} and {candidate}; if they mean the same, give --map FILE"
    ),
    "empty_run": "one of the runs is empty",
}
