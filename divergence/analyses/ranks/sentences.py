"""The sentences of ranks: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "disagree": (
        "{ranks:plural rank} {ranks:names 6} of {side:letter} {alone:yes=disagrees|no=disagree} "
        "with {peers:plural rank} {peers:names 6}"
    ),
    "disagree_untold": (
        "{peers:plural rank} {peers:names 6} and {ranks:plural rank} {ranks:names 6} of "
        "{side:letter} disagree"
    ),
    "disagree_at": "{who} at {site}",
    "disagreement": (
        "{who} at {site} ({pass_} pass, prompt {sample}, step {step}) and at {num_more:,} more "
        "of {num_tensors:,} tensors that both hold; {rel_l2:none=digests do not tell by how "
        "much: it may be a sum in another order on each rank|*=rel L2 {rel_l2:.2e} "
        "there}{told_by:majority=|nobody=; which of them is wrong cannot be told|*=; the other "
        "run agrees with the latter}"
    ),
    "other_order": "{disagreement}: no more than adding in another order explains",
    "by_digests": "known by digests alone",
    "share_off": (
        "at {site} {side:letter}'s rank {rank} holds the share that is off: rel L2 {rel_l2:.2e}, "
        "in the others' shares {rest_rel_l2:.2e}"
    ),
    "of_side": "{ranks:plural rank} {ranks:names 6} of {side:letter}",
    "ran": "{localized:yes=, which {ranks:list  and } ran|no= ({ranks:list  and } ran these)}",
    "ran_wrong": (
        "{ranks} ran {num_run} of the {total} prompts: {num_wrong} of these are beyond the limit, "
        "and none of the {num_others} that other ranks ran"
    ),
}
