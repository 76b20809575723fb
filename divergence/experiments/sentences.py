"""The sentences of experiments: descents, trials, what was made again. See divergence.facts for
the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # diff: the run of an earlier one
    "reference_reused": (
        "that of {earlier}, made by the same command of the same files, code and settings; --fresh "
        "captures it anew"
    ),
    "captured_anew": (
        "captured anew, since {what:code=the code or a library|python=the Python|"
        "environment=the environment|machine=the machine|*={what}} changed[[ after {earlier}]]"
    ),
    # localize: whose operator it is
    "block_by": "block {module} by {side:letter}",
    "operator_by": "operator {site} by {side:letter}",
    "alone_by": "{site} by itself by {side:letter}",
    "levels_apart": "{levels:list}",
    "levels_blame": "the levels blame different sides",
    "truth_not_verified": (
        "A is blamed by a truth that A's code may not have made: remove {truth} and run this on "
        "A's machine"
    ),
    "only_by_reference_code": (
        "B is blamed by A's code; B's machine tells what B's code makes of it in float64"
    ),
    "no_common_site": "the two sides' code has no site in common in this block",
    "codes_apart": (
        "the sides run different code: in float64 {apart}. By A's code B is wrong, by B's A; "
        "{doubt:none=no truth can tell which is right|*={doubt}}"
    ),
    # localize: where it stops
    "truth_is_to_be_made": "the truth has to be made on A's machine, by its code",
    "truth_of_block_is_to_be_made": "the truth of {module} has to be made on A's machine",
    "cannot_be_captured": "{sides:letters} cannot be captured on this machine",
    "other_batches": (
        "this goes no deeper than modules: the sides ran other batches, so their operators have "
        "other shapes"
    ),
    "none_beyond": "no operator of {module} is beyond its limit",
    "behind_operators": (
        "a parameter's gradient is off, and no operator: what adds up, reduces or divides the "
        "prompts' gradients comes after them"
    ),
    "only_one_side_calls": "{calls:list}",
    "side_calls": "only {side:letter} calls {sites:names 3}",
    "made_by_optimizer": (
        "{site} is made wrong by the optimizer's step, after all operators of the model: compare "
        "its settings"
    ),
    "nothing_to_find": "{what}: there is nothing to find",
    "outside_modules": (
        "{site} is made wrong outside blocks and modules: there is none to go into (--block PATH "
        "goes into one all the same)"
    ),
    "nothing_to_go_into": (
        "{kind:identical=the runs are equal bit for bit: there is nothing to find|"
        "within_floor=no block makes an error beyond rounding: there is nothing to go into "
        "(--block PATH goes into one all the same)|"
        "incomparable=the runs are not the same experiment: {first}|"
        "*=no block could be named (--block PATH goes into one all the same)}"
    ),
    "two_truths": (
        "{made} is not the same truth as {truth}: {apart}; {verified:yes={made} was made on a "
        "machine that repeats A, so {truth} was not made by A's code|no=one of them was not made "
        "by A's code}"
    ),
    "not_that_machine": (
        "{made:none=this is not|*={made} was not made on} {side:letter}'s machine ({label}): its "
        "blocks do not repeat ({what})"
    ),
    "site_differs": "{site} differs[[, rel L2 {rel_l2:.2e}]]",
    "no_tensor_to_hold": "no tensor to hold against it",
    # localize: what other machines do
    "makes_truth_by_code": "makes the truth by its code",
    "makes": "makes {name}",
    "proves_it": "proves it there",
    "makes_truths_again": "makes its truths, with both removed",
    "on_machine": "on {side:letter}'s machine[[: {task}]]",
    # localize: what could not be done
    "not_in_float64": "{site} could not be computed in float64: {why}",
    "no_reproducer": "no reproducer of {site}: {why}",
    "with_variables": "the {command} with the recorded environment variables",
    # localize: levels
    "unmeasured": "by how much is not known",
    "rel_l2": "rel L2 {rel_l2:.2e}",
    "errors": "err of A {reference:.2e}, of B {candidate:.2e}",
    # sensitivity
    "not_planted": "not planted for real: {faults:list}",
    "sides_equal": (
        "the two sides are equal bit for bit: a really different machine rounds otherwise, and its "
        "siblings' limits are then wider"
    ),
    "own_truth": "A's own",
    "same_kernels": ("the candidate was made here, with the same kernels: the model has no others"),
    "other_kernels": "the candidate was made here, with other attention kernels: {attention}",
    "and_escalated": "and an escalated pass, which is then made too",
    "more_prompts": "more prompts: with {num_tokens} tokens chance widens some limits",
    "no_input": "no recorded input of the shape of its output",
    "verdict": "{kind}: {what}",
    "unit_of_output": "the block's output",
    "unit_of_update": "what the block adds to its input",
    "unit_of_rms": "the output's rms",
    "unit_of_channel": "one channel of typical size",
    "unit_of_features": "the features, the first ones",
    "fault_scale": "a scale error of {size}",
    "fault_update": "a scale error of {size} in what a block adds",
    "fault_noise": "noise of {size} of the rms",
    "fault_bias": "a bias of {size} of the rms",
    "fault_channel": "one channel off by {size}",
    "fault_zero": "{size} of the features set to zero",
    "label_of_candidate": "made for sensitivity",
    "planted_run": "the planted run",
    # ways of running
    "base_run": "the base run",
    "way_again": "nothing: run again",
    "way_hooks": "no hooks in the model (logits, tokens)",
    "way_threads": "{num} threads for {of}",
    "way_batch": "batches of {size}{padded:yes=, padded|no=}",
    "way_place": "other places in the batch",
    "way_mates": "other prompts in the batch{padded:yes= and pads|no=}",
    "way_pads_left": "{num} pads on the left of each prompt",
    "way_pads_right": "{num} pads on the right of each prompt{prefill:yes=, prefill alone|no=}",
    "way_whole": "decode steps as one forward over the whole text",
    "way_cache": "no cache: each step over the whole text",
    "way_chunks": "prompt fed in chunks of {size}",
    "way_attention": "attention {kernel} for {other}",
    "way_compile": "blocks compiled by inductor",
    "no_way_one_prompt": "there is one prompt",
    "no_way_one_core": "one CPU core",
    "no_way_off_cpu": "the model does not run on the CPU",
    "no_way_too_few_prompts": "it takes four prompts",
    "no_way_padded_right": "an {task} is padded on the right",
    "no_way_no_attention": "the model has no attention",
    "no_way_no_compiler": "no C++ compiler (g++) on this machine",
    "no_way_stepwise": "an {task} has no such decode steps",
    "no_way_decoded": "no decode step was made: every prompt ended after one token",
    "no_way_in_chunks": "an {task} reads its prompt whole",
    "no_way_one_token": "a prompt has one token",
    # selftest
    "step_references": "the CPU's runs and their float64 truth",
    "step_healthy": "{dtype}: capture, compared with the CPU",
    "step_repeats": "three runs have equal bits",
    "step_stored": "--store {store} agrees with the full bytes",
    "step_batch": "one prompt by itself and in a batch",
    "step_whole": "decode steps against one whole forward",
    "step_planted": "a planted fault is found, and its side",
    "step_operators": "operators are run again to the same bits",
    "step_localized": "localize goes down to the planted module",
    "step_mapped": "--device-map",
    "step_truth_there": "float64 truth made on the device",
    "step_measured_there": "compare --device",
    "step_second": "another device of this kind",
    "seen_references": "{num} dtypes, {cpu}",
    "seen_healthy": (
        "{kind}, {num} tensors, rel L2 of blocks up to {rel_l2:.1e}[[, {usage:.0%} of a limit]]"
    ),
    "seen_repeats": "{num} repeated tensors, all bits equal",
    "seen_identical": (
        "[[{device}: ]]identical, {num} tensors[[; {num_skipped} calls could not be run again]]"
    ),
    "seen_truths": "both truths agree to rel L2 {rel_l2:.1e}",
    "seen_figures": "{num} sites, figures equal to {apart:.0e}",
    # one token explained
    "unexplained": "nothing to explain: {why}",
    "other_experiment": "the runs are not the same experiment",
    "no_token": "no token was generated",
    "equal_runs": "the runs are equal bit for bit",
    "no_logits": "the logits of no comparable token were recorded",
    "not_repeated": (
        "this machine does not repeat {run}: the logits' distance differs by {by:.2g} where "
        "{moved:.2g} is to be explained; run this on {side:letter}'s machine"
    ),
    # runs that were made again
    "side": "{side:letter}",
    "without_substitute": "the run without it",
    "shares_nothing": "{run} shares no tensor with {original}",
    "repeats": "{run} repeats {original}: all {num} shared tensors",
    "repeats_not": "{run} does not repeat {original}: {where}",
    "as_far": "{run} is as far from the truth as {original}, though {where}",
    "repeats_differ": "its own repeats differed in {num} of {total}",
    "no_deterministic_form": "it has operators without a deterministic form",
    "runs_eagerly": "it has compiled modules, which run eagerly while operators are recorded",
    "several_processes": "several processes made it, and one repeats it",
}
