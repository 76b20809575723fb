"""Hand-made answers and toy runs, shared by all that compares; what is judged of given numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from divergence.comparison.api import measure_runs, report_on
from divergence.comparison.preflight import preflight
from divergence.facts import worded
from divergence.run.captured import CapturedTensor
from divergence.run.manifest import ModuleNote, SampleTokens, Tokens
from divergence.run.reader import Run
from divergence.run.writer import RunWriter
from tests import by_hand
from tests.shared_fixtures import *  # noqa: F403


@pytest.fixture(scope="session")
def _pair(tmp_path_factory) -> Any:
    """Two runs of blocks h.0 to h.5, measured: eight prompts, a prefill and 64 decode steps."""
    runs = []
    for number in range(2):
        path = tmp_path_factory.mktemp("pair") / "run"
        modules = {f"h.{block}": ModuleNote(kind="Block", role="block") for block in range(6)}
        made = by_hand.manifest(
            id=f"{number:032x}",
            tokens=Tokens(
                samples=[SampleTokens(prompt_ids=[1] * 8, chosen_ids=[2])] * 8,
                groups=[[prompt] for prompt in range(8)],
            ),
            settings={"max_new_tokens": 65},
            plan={"passes": ["free", "anchored"], "modules": modules},
        )
        with RunWriter(path, made) as writer:
            tensor = CapturedTensor(torch.ones(1, 8, 64))
            writer.put(tensor, pass_="free", sample=0, step=0, site="h.0:out", order=0)
        runs.append(Run.open(path))
    return measure_runs(*runs, preflight(*runs))


@pytest.fixture(scope="session")
def judged(_pair) -> Callable[..., Any]:
    """``judged(sites, **changes)``: the report on two runs of which that was measured. ``against``:
    of each site its errors against a truth, and its rows' floor."""

    def call(sites: Any, analyses: Any = ("blocks",), *, against: Any = (), **changes: Any) -> Any:
        samples = type(_pair.samples)()
        for errors in against:
            samples.add(*errors)
        changes = {"sites": list(sites), "anchored": True, "samples": samples} | changes
        return worded(report_on(dataclasses.replace(_pair, **changes), analyses))

    return call


@pytest.fixture(scope="session")
def flagged(judged) -> Callable[..., set[str]]:
    """``flagged(sites, **changes)``: where something is said to be wrong."""

    def call(sites: Any, **changes: Any) -> set[str]:
        return {site.site for site in judged(sites, **changes).sites if site.flagged}

    return call
