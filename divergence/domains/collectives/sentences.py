"""The sentences of collectives. See divergence.facts for the form."""

SENTENCES = {
    # the verdict's headline
    "holds": (
        "{num:1=the one case holds|*=all {num:,} cases hold} on {num_ranks} ranks ({backend}): "
        "{done:yes=every rank is right|no=the ranks whose results are there are right}, and "
        "repeats its bits[[; {orders}]]"
    ),
    "nothing_checked": "nothing was checked but orders and times[[; {orders}]]",
    "none_common": (
        "{checked:yes=each run is right by itself; |no=}no case is common to both"
        "[[ ({num_in_reference} ranks and {num_in_candidate})]]"
    ),
    "all_same": "all {num:,} cases have the same bits, and are right",
    "differ": (
        "{num:,} of {total:,} cases differ, by no more than rounding explains (relative difference "
        "up to {rel_l2:.1e}): {same_orders:yes=in both {reference}|no=in A {reference}, in B "
        "{candidate}}"
    ),
    "adds": "all_reduce adds {ways:list  and }",
    "way": (
        "{order:one addition=in one addition|not revealed=in an order that is not known|"
        "*=by {order}}[[ ({dtype} {size} ...)]]"
    ),
    "order_not_known": "an order that is not known",
    "fault": (
        "{who}: {collective} of {dtype}, {size} ({elements:,} elements), {values}: {what}"
        "[[ ({num_cases:count case} in all: {collectives:list})]]"
    ),
    # who made it
    "ranks": "{num:plural rank} {ranks:names 6}",
    "named": "{ranks}[[ of {side:letter}]]",
    "all_wrong": "{ranks}[[ of {side:letter}]], all wrong (one rank made it, or each did)",
    "one_holds": (
        "{ranks}[[ of {side:letter}]], which alone holds the result (any may have made it)"
    ),
    "nobody": "a rank[[ of {side:letter}]] that cannot be told",
    # evidence
    "fault_line": (
        "[[{side:letter}: ]]{who}, {collective} of {dtype} {size} {values}: {what} ({num_wrong:,} "
        "of {elements:,} elements)[[, and in {num_alike:count more case} alike]]"
    ),
    "usage": (
        "[[{side:letter}: ]]sums are at most {limit_usage:.0%} of what rounding in any order of "
        "{num_ranks} ranks may be off by ({collective})"
    ),
    "replayed": (
        "[[{side:letter}: ]]replaying the orders gives {num:,} recorded elements bit by bit; "
        "partial sums are kept of {kept:list}"
    ),
    "kept": "{dtype} in {accumulates}",
    "identities": (
        "[[{side:letter}: ]]reduce-scatter and all-gather make the all-reduce's bits in "
        "{num_same} of {total} cases, and {num_promised} are promised by the orders of addition"
    ),
    "flushed": "[[{side:letter}: ]]subnormal sums become 0 in {num:count case}",
    # what a check lacks
    "ranks_missing": "not every rank's results are in the run",
    "no_case": "no case was run",
    "nothing_compared": "nothing was compared",
    "part_assumed": "that each rank reduces its own part of the buffer is assumed",
    "look_alike": "what was sent wrong and what was received wrong look alike",
    # what ranks hold in the place of what they should
    "instead": "{where} {what}",
    "all_elements": "all {size:,} elements",
    "last_elements": "the last {num:,} of {size:,} elements",
    "some_elements": "{num:,} of {size:,} elements, from {first:,} to {last:,},",
    "are_nonfinite": "are nan or inf",
    "are_zero": "are 0",
    "are_own": "are what the rank itself put in",
    "are_of_rank": "are what rank {rank} put in",
    "lack": "lack what rank {rank} put in",
    "hold_twice": "hold twice what rank {rank} put in",
    "are_divided": "are the sum divided by {parts}",
    "are_multiple": "are {factor:.4g} times the sum",
    "are_other": "are not what they should be",
    "are_not_exact": "are not the exact sum",
    "are_far": (
        "are up to {large:yes={ratio:,.0f}|no={ratio:.2g}} times as far from the sum as rounding "
        "explains"
    ),
    "swapped": "{chunks:list}",
    "chunk_swapped": "chunk {chunk} holds what belongs in chunk {other}",
    "misfit": "{num:,} elements are there in place of {size:,}",
    "own_part": ", in its part of the buffer",
    "sent": ": what this rank sent",
    "sent_by": ": what rank {rank} sent",
    "adds_in": "adds in {dtype}: with its additions rounded so, every bit is explained",
    "all_add_in": "add in {dtype}: with every addition rounded so, every bit is explained",
    "adds_unlike_others": (
        "adds in {dtype}, unlike the others: every bit is explained so, and not otherwise"
    ),
    "other_order_each_time": (
        "adds in another order each time{part:yes=: only its part of the buffer changes|no=}"
    ),
    "other_bits_each_time": "gives other bits each time",
    "in_call": "in call {call}, {what}",
    "promise_broken": (
        "other bits than all_reduce makes, though both add every element in one order"
    ),
    "bits_differ": "ranks hold different bits",
    "own_orders": (
        "ranks hold different bits, as each of these adds in its own order: {groups:list}"
    ),
    "other_bits": "holds other bits than {ranks}",
    # what was not run, or not compared
    "unsupported": "{dtype} in {collectives:list}: {why}",
    "no_partner": "no partner",
    "other_num_ranks": "{reference} ranks and {candidate}: they add other terms",
    "other_inputs": "the ranks put in other values",
    # faults that can be planted
    "fault_form": "COLLECTIVE=FAULT@RANK, where FAULT is one of",
    "fault_bfloat16": "bfloat16@1     rank 1 adds in bfloat16; float16@1 in float16",
    "fault_float16": "float16@1      rank 1 adds in float16",
    "fault_unordered": "unordered@1    rank 1 adds in another order each time",
    "fault_swap": "swap@1         rank 1 takes its first two chunks for one another",
    "fault_tail": "tail:17@1      the last 17 elements of rank 1's result never arrive",
    "fault_bit": "bit@1          the lowest bit of one element of rank 1's result is another",
    # the order of addition
    "too_many_ranks": "the order of {collective} of {dtype}: too many ranks for its size",
    "chunks": "{order}[[, and {num_more:count more chunk}]]",
    "not_every_case": "not every case was compared",
}
