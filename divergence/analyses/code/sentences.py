"""The sentences of code: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "truth_of_a": (
        "no side named: {because:numbers_in_doubt=the two hold other numbers, the truth A's|"
        "truth_like_b=the runs do not tell whose code the truth has|"
        "*=the two run different code, the truth A's}"
    ),
    "other": "other code: {what}",
    "other_in_block": "the onset's block runs other code: {what}",
    "layout": (
        "{parameter} is {reference:none=contiguous|*=not contiguous (strides [{reference:list}])} "
        "in A, {candidate:none=contiguous|*=not contiguous (strides [{candidate:list}])} in B"
    ),
    "truth_like_b": (
        "the truth is far from A and near B: so a faulty A looks, and so does a truth that B's "
        "code made. The runs do not tell their code, so no side is named: make the truth again on "
        "A's machine"
    ),
    "numbers_in_doubt": (
        "the models hold other numbers there ({numbers:names 2 ; }), and the truth has A's: by it "
        "B is off, but which value is meant it cannot tell"
    ),
    "numbers_stated": (
        "B does not hold what both configurations say ({numbers:names 2 ; }): it is wrong by them"
    ),
    "by_configuration": "B's number is wrong if both configurations are right",
    "side_in_doubt": (
        "the sides run different code ({classes:list}), and the truth has A's: by it B is off, but "
        "whose code is right it cannot tell[[. A's was replaced: {replaced:list}]]"
    ),
}
