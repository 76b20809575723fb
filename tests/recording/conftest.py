"""Captured runs, made once for all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from divergence import LoadOptions, Run

PROMPT = "A bridge is built twice: once on paper, where every beam is exact."


@pytest.fixture(scope="session")
def captured(shared_run) -> Callable[..., Run]:
    """``captured("llama", dtype="bfloat16", tied=True)`` → a run of 4 new tokens.

    Options of the model by name; those of the capture in ``capture_options``. The same
    arguments give the same run.
    """

    def make(architecture: str, *, capture_options: dict | None = None, **model: Any) -> Run:
        options = {"prompts": [PROMPT], "max_new_tokens": 4} | (capture_options or {})
        loading = LoadOptions(trust_remote_code=architecture == "remote-code")
        return shared_run(
            architecture, model={"dtype": "float32"} | model, loading=loading, **options
        )

    return make


@pytest.fixture
def replay(tmp_path) -> Callable[..., Run]:
    """``replay(run, **options)`` → the run repeated on this machine."""
    from divergence import capture

    count = 0

    def again(run: Run | Path, **options: Any) -> Run:
        nonlocal count
        count += 1
        if isinstance(run, Run):  # this machine's user trusts the code of the tiny models
            options = {"trust_remote_code": run.manifest.model.trust_remote_code} | options
        return capture(like=run, out=tmp_path / f"replay-{count}", **options)

    return again


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What one test compiles is not there for the next."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
