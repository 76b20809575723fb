"""The sentences of measuring: notes on runs, truths and trusted runs. See divergence.facts for the
form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "no_prefill": (
        "the prefill was not recorded: what goes wrong there is seen only as far as it shows in "
        "later steps"
    ),
    "truth_incomplete": (
        "the truth is incomplete ({why:none=it was cut off|*={why}}): what it does not hold is "
        "judged without it"
    ),
    "truth_of_free_runs": (
        "the truth has no anchored pass to these inputs: it judges free runs alone"
    ),
    "truth_judges_full": "the truth judges only what both runs keep in full",
    "prefix_read": (
        "sites were matched with the prefix {reference:none=(nothing)|*={reference}} read as "
        "{candidate:none=(nothing)|*={candidate}}"
    ),
    "torn_tail": "{side:letter}'s last record line was cut off and left out",
    "told_to_use": "{side:letter} was told to use {name} {used} instead of {reference}",
    "only_changed": (
        "{side:letter} stores what differs from run {run} alone, which is not at hand: of the rest "
        "digests and statistics are compared"
    ),
    "rerouted": (
        "{num} of {total} tokens went to other experts on one side ({blocks:list}): "
        "rounding[[ (their router logits lay within {margin:.2g})]]; they are not judged there"
    ),
    "mostly_rerouted": "{num} of {total} tokens of {module} ({phase}) went to other experts",
    # what trusted runs did to the limits
    "none_widened": (
        "{runs:1=the trusted run|*=the {runs} trusted runs} stayed within the limits: none was "
        "widened"
    ),
    "widened": (
        "{runs:1=the trusted run|*=the {runs} trusted runs} widened the limits of {num} sites, "
        "most at {site} ({phase}), {times:.1f} times[[: from {before:.1f} to {limit:.1f} × the "
        "floor]]{beyond:yes=; it is beyond the limits itself there, and is believed because you "
        "named it|no=}"
    ),
    # runs that are opened again for a page
    "could_not_be_opened": "{run} could not be opened again: {message}",
    "holds_another": "{run} holds another run now, and is left out",
}
