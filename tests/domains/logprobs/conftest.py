"""Rollouts and a trainer's scores of them, made up: what a cause does to log-probabilities."""

import json
import random

import pytest

from divergence import compare
from tests.digests import without_digests


@pytest.fixture
def pair(tmp_path):
    """``pair(change)``: the report on a rollout and a trainer of which each log-probability is
    ``change(sequence, position, value, random)``. ``manifest``: what both runs' say besides."""
    import_dump = pytest.importorskip("divergence.domains.importing.importing").import_dump

    def make(change, *, num=24, length=60, manifest=(), **options):
        generator = random.Random(3)
        path = tmp_path / "r.jsonl"
        with open(path, "w") as file:
            for sequence in range(num):
                ids = [generator.randrange(1000) for _ in range(5 + length)]
                rollout = [-generator.expovariate(1.2) for _ in range(length)]
                noise = random.Random(sequence)
                trainer = [
                    min(0.0, change(sequence, n, value, noise)) for n, value in enumerate(rollout)
                ]
                line = {
                    "tokens": ids,
                    "response_length": length,
                    "loss_mask": [1] * length,
                    "rollout_log_probs": rollout,
                    "log_probs": trainer,
                }
                file.write(json.dumps(line) + "\n")
        a = import_dump(path, out=tmp_path / "rollout", force=True)
        b = import_dump(path, out=tmp_path / "trainer", layout="trainer", force=True)
        for run in (a, b) if manifest else ():
            file = without_digests(run.path) / "manifest.json"
            said = json.loads(file.read_text())
            for part, fields in manifest.items():
                said[part] |= fields
            file.write_text(json.dumps(said))
        return compare(a.path, b.path, **options)

    return make
