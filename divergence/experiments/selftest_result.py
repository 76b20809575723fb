"""The Selftest: what each device path of the tool did on one machine, as typed data."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.comparison.result import json_safe
from divergence.run.schema.manifest import Environment, Switch

__all__ = ["SELFTEST_SCHEMA_VERSION", "Selftest", "Step", "StepStatus"]

SELFTEST_SCHEMA_VERSION = 1

StepStatus = Literal["ok", "failed", "skipped"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One device path of the tool that was tried."""

    name: str
    status: StepStatus
    seconds: float
    detail: str
    """What was seen, or why the path failed or was left out."""


class Selftest(msgspec.Struct, kw_only=True):
    """The answer of `selftest`."""

    schema_version: int = SELFTEST_SCHEMA_VERSION
    tool_version: str
    device: str
    environment: Environment
    switches: list[Switch] = []
    fallbacks: list[str] = []
    """Operators that the CPU ran in place of the device."""
    steps: list[Step] = []
    complete: bool = False
    """False where the selftest was interrupted."""

    @property
    def failed(self) -> list[Step]:
        return [step for step in self.steps if step.status == "failed"]

    def to_json(self, *, indent: int | None = None) -> str:
        """Strict JSON."""
        text = msgspec.json.encode(json_safe(msgspec.to_builtins(self)))
        return (msgspec.json.format(text, indent=indent) if indent else text).decode()
