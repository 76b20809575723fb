"""The text of single tokens: what a tokenizer does not have, has none."""

import pytest

from divergence.recording.prompts import token_texts


class Tokenizer:
    """Five tokens; ``decoded`` of what is beyond them."""

    def __init__(self, decoded: str) -> None:
        self.decoded = decoded

    def decode(self, ids):
        return "abcde"[ids[0]] if ids[0] < 5 else self.decoded

    def convert_ids_to_tokens(self, token):
        return None if token >= 5 else "abcde"[token]


@pytest.mark.parametrize("decoded", ["", "\ufffd", "a\ufffd"])
def test_an_id_outside_the_tokenizer_has_no_text(decoded):
    """It is told by its number then, not as 'None'."""
    assert token_texts(Tokenizer(decoded), [1, 7, 9]) == {"1": "b"}
