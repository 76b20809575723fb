"""Runs whose files a test changes: without digests, as other programs write them."""

import json
from pathlib import Path


def without_digests(run: Path) -> Path:
    """Takes the digests of manifest and records out of a run's manifest, so that what a test
    changes next is read as it stands."""
    path = run / "manifest.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["digest"]
    values.pop("record_digests", None)
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return run
