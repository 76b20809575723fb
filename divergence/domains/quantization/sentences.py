"""The sentences of quantize: one template for each code. See divergence.facts for the form."""

SENTENCES = {
    # a scheme in words
    "weights": "{format} weights per {per}",
    "activations": "{format} activations per {per}, {when}",
    "cache": "{format} keys and values per {per}",
    "migrated": "scales migrated (alpha {alpha:g})",
    # what is shown
    "costs": (
        "{scheme} costs {kl_mean:.3g} nats of KL a token; the likeliest token stays at "
        "{same_top:.2%} of {num_tokens:count position}"
    ),
    "no_choices": (
        "{num:1=1 matrix|*={num:,} matrices} quantised; the model gives no next-token choices"
    ),
    "quantised": (
        "{weights:no=keys and values|yes={num:1=1 matrix|*={num:,} matrices}}"
        "[[ ({then:,} with the policy below)]][[; kept: {kept:names 4}]]"
    ),
    "holds": (
        "; {what} <= {target:g} holds with {num:none=nothing kept|*={num:1=1 matrix|*={num:,} "
        "matrices} kept in floating point ({weights} weights)}"
    ),
    "kl_mean": (
        "mean {kl_mean:.3g}[[ ± {kl_error:.3g}]], median {kl_median:.3g}, 90% {kl_p90:.3g}, 99% "
        "{kl_p99:.3g}, max {kl_max:.3g} nats"
    ),
    "same_top": "{same_top:.2%}[[ ± {same_top_error:.2%}]]",
    "delta_p_mean": (
        "mean {delta_p_mean:+.2%}[[ ± {delta_p_error:.2%}]], RMS {delta_p_rms:.2%}, 1% "
        "{delta_p_p1:+.2%}, 99% {delta_p_p99:+.2%}"
    ),
    "ln_ratio": (
        "{perplexity_base:.3g} -> {perplexity:.3g}; ln ratio {ln_ratio:+.3g}"
        "[[ ± {ln_ratio_error:.3g}]][[; correlation of ln PPL {ln_correlation:.2%}]]"
    ),
    "measured": (
        "{measured:.3g}{num:none=: nothing need be kept|*=, predicted {predicted:.3g}"
        "{one_fewer:none=|*=; with {fused:none=any one of them|1=them|*=any one of their "
        "{fused:count group} (what engines fuse stays together)} quantised, {one_fewer:.3g} or "
        "more} ({num_runs:count model run})}"
    ),
    "migration": (
        "alpha {alpha:g}: KL {kl:.3g}, without {without:.3g}: {gain:helps=it helps|hurts=it hurts|"
        "none=no difference beyond what so few tokens tell}"
    ),
    # what quantize tells
    "as_it_is": "the model as it is",
    "static_scales": (
        "static scales come from {num_tokens} tokens: at each end of a matrix's range about one "
        "later token in {num_later} lies outside and is clipped[[; {usual} and more are usual]]"
    ),
    "migrated_in": (
        "scales are migrated in {num} of {total} matrices: those that a norm feeds ({num_norms} "
        "norms)"
    ),
    "unreached": (
        "{num} matrices ({first}, ...) got no input: no token reached them, or the model "
        "multiplies with them outside their modules"
    ),
    "numbers_of": "all numbers are those of {model}, of which {difference}",
    "matrices_pay": "divergence quantize RUN --each tells which matrices pay it",
    "by_block": "block by block",
    "elsewhere": "on another machine: does it compute the quantised model right?",
    "which_matrices": "which matrices",
    "what_to_keep": "what to keep",
}
