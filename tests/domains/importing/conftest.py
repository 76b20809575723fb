"""One captured run of the tiny Llama, of which other tools' dumps are written."""

import pytest

from divergence import RecordOptions, Run, capture
from tests.domains.importing.writers import PROMPT_IDS


@pytest.fixture(scope="session")
def captured(tiny_model, tmp_path_factory) -> Run:
    """Prefill of five tokens and two decode steps, every module, eager attention."""
    folder = tmp_path_factory.mktemp("captured")
    return capture(
        tiny_model("llama", num_blocks=2),
        out=folder / "a",
        prompts=[PROMPT_IDS],
        sites="modules",
        max_new_tokens=3,
        device="cpu",
        attn_implementation="eager",
        recording=RecordOptions(anchor=False),
        probe=False,
    )


@pytest.fixture(scope="session")
def faulty(captured, tiny_model, tmp_path_factory) -> Run:
    """The same with a fault in the last block, as another engine would have it: in a free pass."""
    return capture(
        tiny_model("llama", num_blocks=2),
        out=tmp_path_factory.mktemp("faulty") / "b",
        like=captured,
        plants=["model.layers.1.mlp:out=scale:1.5"],
        recording=RecordOptions(anchor=False),
        probe=False,
    )


@pytest.fixture
def told():
    """Collects the notes of an import: ``progress=told`` and then ``told.notes``."""

    class Told:
        def __init__(self) -> None:
            self.notes: list[str] = []

        def __call__(
            self, event: str, done: int, total: int | None = None, detail: str = ""
        ) -> None:
            if event == "note":
                self.notes.append(detail)

    return Told()
