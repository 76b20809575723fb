"""The sentences of gradients: one template for each code. See divergence.facts for the form."""

SENTENCES = {
    "made_in_free": "the error is made at {site}, in the free pass alone: it does not repeat",
    "anchored_passes": "the anchored pass of the same run is right there",
    "free_alone": (
        "in the free pass {site} is off by {rel_l2:.1e} of its norm, and what enters it explains "
        "{limit:.1e}; with equal inputs by {rounding:.1e}. So are {num_beyond} of {num} "
        "parameters' gradients"
    ),
    "off": (
        "{num} of {total} {what} are off, and {optimizer:yes=what enters the optimizer's step is "
        "equal|no=nothing that blocks hand on in the backward is}: {cause}"
    ),
    "cause_clipping": "not a kernel, but how they are clipped or unscaled",
    "factor": (
        "all of them are {factor:.4g} × A's in B: {clipped:yes=another limit, norm or loss "
        "scale|no=a divisor (ranks, micro-batches, tokens) or a loss scale that is not the same}"
    ),
    "as_in_others": ", as in {num} more of {total} {what}",
}
