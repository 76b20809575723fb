"""The sentences of the gate: rules that are not met, known differences, what to know. See
divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # rules that are not met
    "kind": "{word} ({kind})",
    "verdict_refused": (
        "{kind}; allowed: {allowed:list}[[. Known differences do not excuse it: {why_not}]]"
    ),
    "whole_refused": "the new run's whole pass: {kind}: {what}",
    "other_inputs": (
        "the new run was captured like another run, so its blocks did not get this golden's "
        "inputs: {again}"
    ),
    "nothing_compared": "nothing was compared, so nothing was checked",
    "blocking": ("{check}: {reference} in the golden, {candidate} in the new run[[ ({details})]]"),
    "share_too_low": "{what}: {share:relative} of them, and the policy wants {least:share}",
    "records_compared": "{num} records of the golden were compared and {num_left_out} were not",
    "pass_compared": (
        "{pass_} pass: {num} {what:operators=records of operators|*={what}} of the golden were "
        "compared{num_left_out:0=|*=, {num_left_out} were not}{num_extra:0=|*=, {num_extra} of "
        "the new run have no partner}[[ ({why})]]"
    ),
    "setting_differs": (
        "{check} {status:unknown=is not known|*=differs}: {details:none={reference} in the golden, "
        "{candidate} in the new run|*={details}}"
    ),
    "no_token_in_golden": (
        "the golden holds no generated token: capture it with --max-new-tokens 1 or more, or "
        "leave [tokens] out of the policy"
    ),
    "tokens_too_few": (
        "{num_equal} of {total} generated tokens are equal{num_ties:0=|*= ({num_ties} more were "
        "ties)}{num_missing:0=|*=, {num_missing} of the golden's were not generated}; the policy "
        "wants {least:share}"
    ),
    "no_site_meant": (
        "no compared site matches {sites}[[ in the {pass_} pass]]; if the policy serves other "
        "models too, write optional = true"
    ),
    "number_unknown": (
        "{name} is unknown at {place}, where {of_floor:yes=there is no floor|no=not both sides "
        "keep what it takes (--store)}"
    ),
    "number_beyond": "{name} is {value:.3g} at {place}; the policy allows {limit:g}",
    "not_known_here": "{name} is not known here[[; did you mean {near:list  or }?]]",
    "number_off": "{name} is {value:.3g}; the policy wants {allowed}",
    # which runs are goldens
    "stopped": "it is incomplete (stopped by {by:none=a crash|*={by}})",
    "no_record": "it holds no record",
    "only_changed": (
        "it holds only what differs from run {run}, which the next --bless would remove"
    ),
    "is_truth": "it is a truth, computed in {dtype}",
    "planted": "it carries planted faults ({plants:list})",
    "substituted": "it holds results of another run ({runs:list})",
    "choice": (
        "{path}, of {num} there: {lacks:=the same {device:yes=|no=kind of }device and dtype|"
        "dtype=of another dtype: none here is {name}|kind=of another kind of device: none here is "
        "{name}|*=of another dtype and another kind of device: none here is {name}}"
    ),
    # what a rule allows
    "the_same": "the same",
    "some_tokens": "some generated tokens",
    "a_site": "a site to hold it against",
    # notes
    "same_run": "it is the same run, {id}",
    "golden": "the golden is {what}",
    "other_code": "WARNING: other code or constants at equal settings: {details}",
    "no_such_check": "preflight.{key}: no check here is called {pattern}[[; {hint}]]",
    # known differences
    "place": "{site} ({pass_}, prompt {sample}, step {step})",
    "flagged_not_known": "flagged and not known: {place}{num_more:0=|*= and {num_more} more}",
    "rests_on_no_record": (
        "what the verdict rests on is no flagged record, and only such can be known"
    ),
    "operator_beyond": "the operator {site} is beyond its limit",
    "ends_elsewhere": "the verdict ends at {site}, which is no flagged record",
    "ranks_disagree": "ranks that must agree do not",
    "drifts_beside": "beside what is known, {what}",
    "unused": "nothing that is flagged is meant; take the entry out if the difference is gone",
    "expired": "it held until {until} and excuses nothing any more",
    "exceeded": "it is larger than known: {figures:list} at {place}",
    "used": "{num} flagged records, {figures:list}[[, until {until}]]",
    "figure": "{name} {value:none=unknown|*={value:.3g}} of {limit:g}",
}
