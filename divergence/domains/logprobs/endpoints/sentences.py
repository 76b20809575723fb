"""The sentences of endpoints: one template for each code. See divergence.facts."""

SENTENCES = {
    # what a server gives
    "server": "{kind} {version}, {protocol}: gives {gives:list}[[; it answers as {answers_as}]]",
    "logprobs": "log-probabilities with the {num_top} likeliest tokens",
    "token_ids": "token ids",
    "prompt_ids": "the prompt's token ids",
    "scores": "scores of prompts",
    "text": "text alone",
    # what it lacks, and what cannot be concluded then
    "no_logprobs": "no log-probabilities: texts alone are compared",
    "no_likeliest": "no likeliest tokens beside the chosen one: no KL, no margins",
    "no_token_ids": "no token ids: tokens are matched by text, and two may share one",
    "only_number_of_prompt": (
        "the prompt's token ids are not told, only their number: another template of the same "
        "length is not seen"
    ),
    "no_prompt_ids": ("nothing is told of the prompt's tokens: another template is not seen"),
    "scores_by_steps": ("prompts are not scored: with --like each token is a request of its own"),
    "no_scores": "prompts are not scored: answers are compared up to the first difference",
}
