"""The sentences of quantize: one template for each code. See divergence.facts for the form."""

SENTENCES = {
    # a scheme in words
    "weights": "{format} weights per {per}",
    "activations": "{format} activations per {per}, {when}",
    "cache": "{format} keys and values per {per}",
    "migrated": "scales migrated (alpha {alpha:g})",
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
        "{num} of the matrices ({first}, ...) got no input: no token reached them, or this model "
        "multiplies with them past their modules, where nothing is quantised"
    ),
    "numbers_of": "all numbers are those of {model}, of which {difference}",
    "matrices_pay": "divergence quantize RUN --each tells which matrices pay it",
    "by_block": "block by block",
    "elsewhere": "on another machine: does it compute the quantised model right?",
    "which_matrices": "which matrices",
    "what_to_keep": "what to keep",
}
