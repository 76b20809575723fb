"""The sentences of the precision audit. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

_EXPECTED = "[[; expected {expected:list  or } ({expected_from})]]"

SENTENCES: Mapping[str, str] = {
    # what one side computes otherwise
    "computes": (
        "{side:letter} computes {part} in {place}, {other:letter} in {dtype}"
        "[[, also in {num_more:count other module}]]" + _EXPECTED
    ),
    "computes_below": (
        "{who:run=the run computes|both=both sides compute|*={who:letter} computes} {part} in "
        "{place}" + _EXPECTED + "[[; on the other side it is inside {kernel}]]"
    ),
    "place": (
        "{dtype} ({where}{accumulates:yes=; as stored: what its kernel accumulates in is for the "
        "probe to tell|no=})"
    ),
    # what one side does in a training step
    "reduced_gradients": (
        "{who:run=the run reduces|both=both sides reduce|*={who:letter} reduces} gradients among "
        "ranks in {dtype}[[, {other:letter} in {other_dtype}]]" + _EXPECTED + "[[{errors}]]"
    ),
    "gradient_sums": (
        "{who:run=the run adds|both=both sides add|*={who:letter} adds} up micro-batches' "
        "gradients in {dtype}[[, {other:letter} in {other_dtype}]]" + _EXPECTED
    ),
    "moments": (
        "{who:run=the run keeps|both=both sides keep|*={who:letter} keeps} the optimizer's moments "
        "in {dtype}[[, {other:letter} in {other_dtype}]]" + _EXPECTED
    ),
    "buffers": (
        "{who:run=the run keeps|both=both sides keep|*={who:letter} keeps} the model's buffers in "
        "{dtype}[[, {other:letter} in {other_dtype}]]" + _EXPECTED
    ),
    "main_weights": (
        "{who:run=the run steps|both=both sides step|*={who:letter} steps} the {dtype} weights "
        "themselves, without float32 copies[[ ({holder:letter} has them)]][[: {unmoved:list  and } "
        "of the weights that have a gradient did not move, the step was too small]]" + _EXPECTED
    ),
    "unmoved": "{share:.1%}",
    "gradient_errors": (
        "; parameters' gradients are off the truth by A {reference:.1e}, B {candidate:.1e} (median "
        "parameter)"
    ),
    # who expects it
    "common_practice": "common practice",
    "model_dtype": "the model's dtype",
    "autocast": "autocast",
    "megatron": "Megatron-LM's default",
    "mixed_precision": "Micikevicius et al. 2018",
    # below the table
    "other_dtypes": (
        "the runs have different dtypes: each is held to what is expected, not to the other"
    ),
    "probed": (
        "{sides:list  and }: {dtype} is accumulated in {accumulator} (probed: {operators:list})"
    ),
    "side": "{side:none=the run|*={side:letter}}",
}
