"""The sentences of preflight: what is known of a setting that differs. See divergence.facts for
the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # how a setting of one side is shown
    "num_classes": "{num} classes of module",
    "recorded": "{recorded:yes=recorded|no=not recorded}",
    "prompts": "{num} {num:plural prompt}, {num_tokens} tokens",
    "num_tokens": "{num} tokens",
    "determinism": "{deterministic:yes=deterministic|no=not deterministic}",
    "repeats": (
        "{runs:none=not measured|*={runs} runs, {num:0=all bits equal|*={num} of {total} tensors "
        "differ}}"
    ),
    "autocast": "{dtype} under autocast {autocast}",
    "computed": "{dtype} computed in {computed}",
    "batches": ("{num} × batch {sizes:list /}[[, in chunks of {chunk}]]{cache:yes=|no=, no cache}"),
    "labels_own": "each token its own",
    "scales_migrated": "scales migrated by alpha {alpha:g}",
    "static_range": "static range of {name} {what}{num_more:0=|*= and {num_more} more}",
    "migrated_scales": "migrated scales of {name} {what}{num_more:0=|*= and {num_more} more}",
    # settings
    "wider_dtype": "compared in the wider of the two",
    "framework_differs": "the framework differs too: a cause beside the machine",
    "no_kernel": "there the device has no kernel",
    "unlike_ranks": "its ranks ran on unlike machines: {machines:list}",
    "switches_otherwise": "set otherwise: {names:names}",
    "switches_refused": "refused: {names:names}",
    "nondeterministic": "nondeterministic operators: {names:names}",
    "repeats_not": "a machine does not repeat itself, first at {site}[[; {begins}]]",
    "begins": "it begins in {num} of {total} forwards: {places:names 3}",
    "completeness": "{complete:yes=complete|no=incomplete ({why:none=killed|*={why}})}",
    "only_what_both_hold": "only what both hold is compared",
    # code
    "code_differences": "{differences:names 3 ; }",
    "replaced": "{what} on {side:letter}",
    "replaced_of_torch": "{what:list ; } on {side:letter}",
    "wrapped": "{name}: {what}, on {side:letter}",
    "attribute": "{name}.{key} {reference} / {candidate}[[ in {where}]][[ in {num} modules]]",
    "attribute_changed": (
        "{name}.{key} changed while running, on {side:letter}, while prompt {sample} ran"
    ),
    "compiled": (
        "{name}: {reference:none=not compiled|*={reference}} on A, "
        "{candidate:none=not compiled|*={candidate}} on B"
    ),
    "other_code": (
        "{name}: other code of {functions:none=forward|*={functions:list}}[[ in {where:list}]]"
        "[[ (replaced in both: {replaced})]]"
    ),
    "class_alone": (
        "{name} ({origin}) only on {side:letter}[[ in place of {instead:list}]][[ ({how:list ; })]]"
    ),
    "version": "{name} {reference} / {candidate}",
    "few_codes": "{differences:list ; }[[ ({versions:list})]]",
    "many_codes": "other code in {num} classes[[ ({versions:list})]]: {names:names 3}",
    # configuration
    "config_differences": "{differences:names 6 ; }",
    "config_value": (
        "{key} {reference}[[ ({reference_place})]] / {candidate}[[ ({candidate_place})]]"
        "[[ ({place}, there {other_place})]]"
    ),
    "config_only": "only in {side:letter}: {shown:names 6}",
    "moved_keys": "the same values, {num} of them under other keys",
    "config_not_recorded": "in what is not recorded of it",
    # pictures and sound
    "media": "{num} {num:plural file}, {digest}",
    "media_differ": (
        "{names:list} of prompt {sample}{num_more:0=|*= (and of {num_more} more)} differ: {cause}"
    ),
    "media_files": (
        "other files: {reference:none=none|*={reference:list}} / "
        "{candidate:none=none|*={candidate:list}}"
    ),
    "media_settings": "the same files, another processor: {differences:names 6 ; }",
    "media_arithmetic": (
        "the same files and the same settings, so the processor computed otherwise: another "
        "version of it, another backend, or this machine's kernels"
    ),
    # tensors that modules made
    "derived": "{names:names}: {how}",
    "derived_changed": (
        "changed while running, {side:none=on both sides, at different prompts|*=on {side:letter}, "
        "while prompt {sample} ran}"
    ),
    "derived_dtypes": "{reference} / {candidate}, equal values but for rounding",
    "derived_behind": "other values behind the first {num}",
    "derived_constant": "{side:letter}'s is {value:g} from index {first} on",
    "derived_values": "from index {first} on {reference:.6g} / {candidate:.6g}",
    # parameters by name
    "prefix_read": "{reference:none=(nothing)|*={reference}} read as {candidate:none=(nothing)|*="
    "{candidate}}",
    "by_map": "by the name map",
    "left_over": "{num} only in {side:letter}: {names:names}",
    "told_differ": "{num} of {total} parameters that both tell differ: {names:names}",
    "told_equal": (
        "{num:0=none can be told|*=the {num} parameters that both tell are equal}: not every "
        "engine tells its weights"
    ),
    # weights
    "missing": ("{num} parameters were missing from the checkpoint and are random: {names:names}"),
    "codes_against": "{reference} against {candidate}: not the same model",
    "rounded": "the same weights, rounded from {wide} to {narrow}",
    "other_parameters": "other parameters: {matching:list ; }",
    "other_names": "the same values under other names: {matching:list ; }",
    "other_weights": "other weights",
    "digests_of_other_names": "digests of other names and dtypes cannot be compared",
    "digests_of_dtypes": "digests of different dtypes cannot be compared",
    "other_after_rounding": "other weights, also after rounding to one dtype",
    "offloaded": "{num} offloaded parameters were not digested",
    "undigested": (
        "whether both have the same weights is not known: a side's digests are not recorded"
    ),
    "model_and_suite": (
        "{a_is_suite:yes=B is a run of a model, and A|*=A is a run of a model, and B} of operators "
        "alone"
    ),
    "no_digests": "the parameters' digests are not recorded",
    "parameters_differ": "{num} of {total} parameters differ: {names:names 3}",
    "dequantized": (
        "the codes and scales are equal, and {num} of {total} modules are dequantised to other "
        "weights: {names:names}"
    ),
    # how weights that are not equal belong together
    "relations": "{relations:names 4 ; }",
    "relation": "{names:names 2}: {apart:none=|*=about {apart:list  to } apart}[[{how}]]",
    "initialised": "freshly initialised on {side:letter}, whose checkpoint lacks it",
    "tied_alone": "the same values as {key} on {side:letter} alone, as of tied weights",
    "shapes": "{reference:lengths} / {candidate:lengths}",
    "values_in_dtypes": "{reference} / {candidate}, equal values",
    "rounded_to": "{side:letter} = {other:letter} rounded to {form}",
    "all_zeros": "all zeros on {side:letter}",
    "dtypes_apart": "{reference} / {candidate}, as far apart as their rounding",
    "rows_moved": "the same rows in another order",
    "columns_moved": "the same columns in another order",
    "scaled": "B = {factor:.6g} x A",
    "as_quantised": ", as after quantising ({steps:list})",
    "one_step": "{side:letter}'s numbers are multiples of one step",
    "as_trained": ", as after training further",
    "as_merged": (
        ", no more than rounding to {dtype} makes: merged or rounded in another order, or trained "
        "further"
    ),
    # guesses at a cause
    "adapters": (
        "{side:letter} holds {num} adapter weights ({adapter}{merged:yes=|no=, not merged})"
    ),
    "vocabulary": (
        "{size:none=another vocabulary, or one padded otherwise|*=the vocabulary of {size:,} "
        "tokens is padded otherwise}: {reference:,} rows of the {what:embedding=embedding|"
        "head=output matrix} / {candidate:,}"
    ),
    "tied": "{names:list  and } are tied on {side:letter}, and differ on {other:letter}",
    "one_layer": "all of them in {module}: as after training this layer further",
    "one_kind": "only {names:list}, in every block: as after merging an adapter",
    # tokenizers, templates, prompts
    "same_example": "the same text for a short conversation",
    "rendered": "rendered text differs {place}",
    "texts_from": "from character {character} on: {reference} against {candidate}",
    "tokenizer_sizes": "{reference:,} tokens / {candidate:,}",
    "tokenizer_rules": "{size:,} tokens on both sides: other texts, merges or rules",
    "number_of_prompts": "{reference} prompts against {candidate}",
    "prompt_differs": (
        "prompt {sample} differs from token {token} on: {reference:squared} against "
        "{candidate:squared}[[{text}]]"
        "[[; {edit}]]"
    ),
    "text_cause": (
        " (the text is the same{edit:yes=: one side's tokenizer adds tokens to it|no=, so the "
        "tokenizers differ})"
    ),
    "texts_differ": " (their texts differ {place})",
    "prompts_of_numbers": "the prompts differ: {reference} against {candidate}",
    "prompts_differ": "the prompts differ",
    "edited": "the {what} differ; prompt {sample}: {edit}",
    "parting": (
        "the {what} differ; prompt {sample} parts at token {token}: {reference:squared} / "
        "{candidate:squared}"
    ),
    "begins_twice": "{side:letter} begins with token {token} twice, {other:letter} once",
    "has_more": (
        "{place:begin={side:letter} begins with {tokens}, which {other:letter} lacks|"
        "end={side:letter} ends with {tokens}, which {other:letter} lacks|"
        "*=from token {place} on {side:letter} has more: {tokens}}"
    ),
    "tokens": "{num:1=token {ids:list}|*={num} tokens, {ids:squared}}",
    "labels": "prompt {sample}, token {token}: label {reference:none=none|*={reference}} against "
    "{candidate:none=none|*={candidate}}",
    "tokens_untold": "a side does not tell the tokens it was fed",
    # tokens that were fed
    "forced": "forced to the recorded tokens",
    "fed_as_told": "as far as both sides tell what they were fed",
    "forced_padding": "forced; padding follows where a prompt ended before its batch",
    "other_tokens": "other tokens on each side",
    # compared all the same, or stopped
    "other": "other {checks:list  and other }",
    "and": "; {what}",
    "blocking": ("{check}: {details:none={reference} against {candidate}|*={details}}"),
    # two truths
    "truths_apart": (
        "{site} (prompt {sample}, step {step}) differs by {rel_l2:.2e}, and two float64 runs of "
        "one code by at most {limit:.0e}"
    ),
}
