"""The sentences of experts: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "router_of": "the router of {module}",
    "router_sends": (
        "{router} sends tokens to other experts than {scores:yes=its own scores say|no=rounding "
        "explains}"
    ),
    "routers_send": (
        "{num} of {num_routed} routers, from {router} on, send tokens to other experts than "
        "rounding explains"
    ),
    "router_coarse": (
        "[[{num} of {num_routed} routers, from ]]{router}{num:none=|*= on,} "
        "{num:none=computes|*=compute} in {dtype} in {side:letter}, in {other_dtype} in "
        "{other:letter}"
    ),
    "hidden": "what it makes of the scores is no more than rounding",
    "sent_elsewhere": (
        "{num_different} of {num_compared} tokens went to other experts, far from any tie: the "
        "first is token {token} of prompt {sample}, step {step}, to [{reference:list}] in A and "
        "[{candidate:list}] in B"
    ),
    "shared": (
        "the {num_tokens:1=token|*={num_tokens} tokens} beyond the typical token's limit "
        "{num_tokens:1=|*=all }went to {experts:plural expert} {experts:list}; of the {num_fine} "
        "that are fine, {num_there:0=none|*={num_there}} did"
    ),
}
