"""The sentences of the checklist: points, rungs and notes. See divergence.facts for the form."""

SENTENCES = {
    # titles
    "point_weights": "weights, precision",
    "point_greedy": "greedy decoding",
    "point_seed": "seed",
    "point_engine": "prefix cache etc. off",
    "point_deterministic": "deterministic",
    "point_tokens": "rendered tokens",
    "point_logprobs": "log-probs recorded",
    "point_logprob_diff": "log-probs agree",
    "rung_tokens": "the same tokens, by the same template",
    "rung_weights": "the same weights in the same precision",
    "rung_code": "the same code, configuration and attention",
    "rung_prefill": "the prefill is within rounding",
    "rung_decode": "the decode steps are within rounding",
    "rung_sampling": "each token is the largest of its own logits",
    "rung_ranks": "ranks agree on what several of them hold",
    # how two sides are said
    "both": "both: {what}",
    "each": "A: {reference}{apart:yes=;|no=,} B: {candidate}",
    "first_parts": "{parts:names 2 ; }",
    # what a run does not tell
    "not_recorded": (
        "{sides:list  and }: {what:tokens=how tokens were chosen is|seed=a seed is|"
        "prefixes=whether an engine cached prefixes is|settings=settings are|"
        "processes=processes are} not recorded"
    ),
    "code_not_recorded": "{sides:list  and }: code not recorded",
    "digests_not_recorded": (
        "{sides:none=a run|*={sides:list  and }}: digests of the parameters are not recorded"
    ),
    "lines_not_known": "not known: {checks:list}",
    # weights, precision
    "computed_as": "{dtype}[[ ({quantized})]][[ (computed in {computed})]]",
    "other_check": "other {check}",
    "offloaded": "{num} offloaded parameters were not digested",
    "same_values": "the same values",
    "weights_detail": "weights: {details}",
    "same_weights": "the same weights ({digest})",
    # code and settings
    "line_differs": "{check} {reference} / {candidate}[[: {details}]]",
    "same_code": "the same code of {num} classes of module",
    "effect": "{what}; {identical:yes=every bit is equal|no=no more than rounding}",
    "unjudged_code": "{what}; {why}",
    "code_explains": "{difference}: where the error begins, {site}",
    "choices_off": (
        "{num_misfits} tokens are not the largest of their own logits; first in {side:letter}, "
        "prompt {sample}, step {step}: {largest} is {behind:.3g} above the chosen {chosen}"
    ),
    # tokens and how they were chosen
    "choice_of_tokens": "{how:none=chooses no token|forced=tokens forced|greedy=greedy}",
    "seeds": "{seeds}{same:yes=|no=; decoding is greedy and draws nothing}",
    "tokens_not_told": "a run does not tell the tokens it was fed",
    "prompts_differ": (
        "{details:none=other ids|*={details}}{template:none=|*=; chat template: {template}} (A: "
        "{reference}, B: {candidate})"
    ),
    "another_template": "another one",
    "no_prompt_ids": "neither run records the ids of a prompt",
    "tokens_equal": (
        "{num:,} of {num:,} prompt tokens are equal[[, though by another {other:list  and }]]"
    ),
    # engines
    "plain_engine": "{name}, which does neither",
    "engine_facts": "{name}: {parts:list}",
    "engine_fact": "{key} {state}",
    "engine_silent": "{what:prefix=prefix caching|specul=speculation} not told",
    # determinism
    "repeats_not": "does not repeat itself, first at {site:none=an unnamed tensor|*={site}}",
    "determinism": (
        "{deterministic:yes=|no=not }deterministic[[ ({parts:list ; })]]"
        "{repeats:yes=, repeats itself bit for bit|no=}"
    ),
    "not_repeated": "{parts:list ; }, and not captured with --repeat",
    "refused": "refused {names:names 2}",
    "nondeterministic": "nondeterministic {names:names 2}",
    "no_switch": "no switch is recorded",
    "set_otherwise": "{what}; set otherwise: {names:names 3}",
    # logits
    "logits_not_named": "neither run says which of its tensors are logits",
    "no_logits": "no logits",
    "logits_kept": "logits of {kept} of {seen} forwards{kept:0= (no values kept)|*=}",
    "logits_not_compared": "the logits of both sides were not compared",
    "logits_equal": "the logits of {num} forwards are equal bit for bit",
    "logits_nonfinite": "the logits hold nan or inf",
    "logits_unmeasured": "the logits of {num} forwards differ, by how much is not known",
    "logprob_changes": (
        "differ by up to {nats:.1e} nats[[; {num_equal} of {num_tokens} tokens equal]]"
        "{verdict:none=; no more than rounding explains|*=; compare: {verdict}}"
    ),
    # prefill and decode
    "beyond_too": "beyond the limit too: {site}",
    "forward_not_told": "{what}; in which forward is not told",
    "beside_nonfinite": "beside nan and inf no difference is judged",
    "nothing_of_phase": "no tensor of {decode:yes=a decode step|no=the prefill} was compared",
    "phase_unmeasured": "{num} of {total} tensors differ, by how much is not known",
    "all_equal": "all {num:count tensor} equal bit for bit",
    "within": (
        "{total:,} tensors, {num_equal:,} equal bit for bit, the rest within rounding"
        "{free:yes= (free runs alone: low confidence)|no=}"
        "[[: at most {usage:.0f}% of a limit, at {site}]]"
    ),
    # sampling
    "no_common_token": "no token was generated on both sides",
    "chooses_none": "both: the model chooses no token",
    "choices_equal": (
        "{forced:yes=A's tokens were fed to B; |no=}{num_equal:,} of {num_tokens:,} choices are "
        "equal{num_missing:0=|*=, {num_missing:,} of A's were not made}"
    ),
    "choices_differ": (
        "{forced:yes=A's tokens were fed to B; |no=}{num} of {num_tokens:,} choices differ, first "
        "at prompt {sample}, step {step}{kept:no=; the logits that decided were not kept|"
        "yes=[[ ({judgement})]]; each is the largest of its own side's logits}"
    ),
    # ranks
    "processes": (
        "{processes}{copies:none=|lone=; no tensor is held by several ranks|"
        "order=; copies differ as adding in another order does|"
        "agree=; all copies of {num:,} tensors agree}"
    ),
    # the ladder, notes
    "explained_by": "{rung:code=code may explain it|*=explained by {rung}}",
    "planted": "{side:letter} has planted faults: {plants:list}",
    "incomplete": (
        "{side:letter} is incomplete ({why:none=killed|*={why}}): only what both hold is compared"
    ),
    "equally_wrong": "both are far from the truth: equal, and equally wrong",
    "other_settings": (
        "{num:count other setting} {num:1=differs|*=differ}: {checks:list} (compare -v)"
    ),
}
