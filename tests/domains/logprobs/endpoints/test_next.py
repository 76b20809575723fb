"""The command under `next` can work with the server and the runs that it names."""

import pytest


@pytest.mark.parametrize("other", [None, "weights", "noise"])
def test_every_command_that_is_offered_of_a_served_model_works(stub, follow, invoke, other):
    """Of a run, and of two runs of the same server, or of one that answers otherwise."""
    ask = (
        "capture",
        "--endpoint",
        stub.url,
        "--model",
        "tiny",
        "-o",
        "a",
        "--prompt",
        "one two three",
        "--max-new-tokens",
        "4",
    )
    places = {"URL": stub.url, "MODEL": "tiny"}
    assert follow(*ask, **places)
    if other == "weights":
        stub.weights = 1
    elif other == "noise":
        stub.noise = 0.02
    code, _, err = invoke(
        "capture", "--endpoint", stub.url, "--like", "a", "--model", "tiny", "-o", "b"
    )
    assert code == 0, err
    follow("compare", "a", "b", "-v", **places)
    follow("compare", "a", "b", "-v", **places)
