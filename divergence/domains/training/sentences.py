"""The sentences of training, of curves and of plans: one template for each code. See
divergence.facts."""

SENTENCES = {
    # two curves of losses
    "of_side": "{side:letter}: {what}",
    "alone": "{metric} is in {side:letter} alone",
    "other_steps": (
        "A has {num_reference:,} steps, B {num_candidate:,}, of which {num_common:,} are in both"
    ),
    "goes_on": "{side:letter} goes on to step {step}, behind the other's last, {end}",
    "rows_without_step": "{num_rows:,} rows have no step: the row's number is taken",
    "repeated_steps": ("{num_values:,} values are of a step that came before: the last one counts"),
    "nonfinite": (
        "the loss of {side:letter} is nan or inf at step {step}, where the other's is finite"
    ),
    "no_common_step": "no step is in both files",
    "other_intervals": (
        "A is logged every {reference:g} steps and B every {candidate:g}: a logged loss may be a "
        "mean over steps, so they may not be of the same tokens"
    ),
    "no_finite_step": ("no step with a finite loss other than 0 is left behind the warm-up"),
    "equal_nonfinite": "both losses are equal, nan or inf at step {step}",
    "equal": "the loss of {num_steps:count step} is equal on both sides",
    "both_nonfinite": (
        "both losses are nan or inf at step {step}; before, the mean error is {mean:relative}"
    ),
    "mean_error": "the mean error of the loss is {mean:relative} over {num_steps:,} steps",
    "few_steps": "{num_steps} steps are compared, and {least} are needed",
    "trend_not_known": ", but {why} to tell a trend from noise",
    "bias": ", {bias:relative +}[[ ± {error:relative}]] with its sign",
    "leaves_noise": (
        "; {look:yes=a place to look: |no=}the difference leaves its noise {step:none=from the "
        "start|*=near step {step}}[[, {end:relative +} at the end]]"
    ),
    "drifts": (
        ", but the difference leaves its noise {step:none=from the start|*=near step {step}} and "
        "is {end:relative +} at the end"
    ),
    "no_trend": ", and no trend leaves the noise of the steps",
    "noise_of_steps": (
        ", which is the noise of single steps: with its sign it is {bias:relative +} ± "
        "{error:relative}, and no trend leaves the noise"
    ),
    "between_bands": (
        ", between the bands or not apart from noise: {bias:relative +} ± {error:relative}"
    ),
    "beside": "; {look:yes=a place to look: |no=}{what}",
    "step_off": "step {step} is off by {error:relative}",
    "jump": (
        "step {step} is off by {error:relative}, where the {num_before:count step} before it "
        "{before:none=are equal|*=agree to {before:relative}}"
    ),
    "no_rounding": (
        ": no rounding goes apart at one step. The mean error is {mean:none=unknown|*="
        "{mean:relative}} over {num_steps:count step}"
    ),
    # the plan of a step
    "gradients": "gradients",
    "parameters_forward": "parameters, forward",
    "parameters_backward": "parameters, backward",
    "parameters_updated": "parameters, updated",
    "activations_forward": "activations, forward",
    "activations_backward": "activations, backward",
    "zero_optimizer": (
        "torch's ZeroRedundancyOptimizer keeps each parameter's moments whole on one rank: the "
        "fullest holds {fullest_bytes:size} in place of {moment_bytes:size}; under DDP it sends "
        "1.5 times as much"
    ),
    "ddp_buckets": (
        "DDP without gradient_as_bucket_view=True holds {gradient_bytes:size} more: gradients and "
        "its buckets"
    ),
    "shared_input": (
        "matrices with the same input (q, k, v) are counted with one all-reduce in the backward; "
        "transformers' own plan makes one for each of {num_matrices}"
    ),
    "whole_table": (
        "torch's DTensor holds the gradient of {parameter} whole, {more_bytes:size} more than its "
        "part{counted:yes=|no=, which is not counted}"
    ),
    "no_checkpointing": "the model's class has no gradient checkpointing",
    "no_activations": (
        "activations are not known, since the step cannot be run without values: {error}"
    ),
    # precision policies
    "policy_forms": (
        "a ds_config.json, Megatron-LM's arguments or log, or the text "
        "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)"
    ),
}
