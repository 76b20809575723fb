"""What the user of `capture` chose: options that need others, and defaults where none is given."""

from __future__ import annotations

from typing import Any

from divergence.cli.options import settings
from divergence.errors import UsageError

__all__ = ["capture_defaults", "chosen_substitutes", "only_with_like"]


def chosen_substitutes(words: list[str]) -> dict[str, str]:
    """``SITE=RUN`` (or ``SITE=RUN=OTHER_SITE``) as site → run."""
    found: dict[str, str] = {}
    for word in words:
        site, equals, run = word.partition("=")
        if not (site and equals and run):
            raise UsageError(
                f"--substitute {word!r}: there is no RUN after a =",
                hint="for example --substitute model.layers.3.mlp/aten.mul:out=RUN",
            )
        found[site] = run
    return found


def only_with_like(options: dict[str, Any]) -> None:
    """Raise UsageError for an option that repeats something, where nothing is repeated."""
    for name, value in options.items():
        if value:
            raise UsageError(
                f"{name} needs --like",
                hint="name the model as the argument"
                if name == "--model"
                else "divergence capture --like RUN -o OTHER",
            )


def capture_defaults(like: str | None, model: str | None) -> dict[str, Any]:
    """Settings from the environment and the file; with --like, and for a suite of operators, only
    those of the machine."""
    import msgspec

    known = msgspec.structs.asdict(settings("capture"))
    machine_alone = like is not None or (model is not None and model.startswith("suite:"))
    of_machine = ("device", "device_map", "label")
    return {
        name: value
        for name, value in known.items()
        if value is not None and (not machine_alone or name in of_machine)
    }
