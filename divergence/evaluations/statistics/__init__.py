"""Statistics of paired scores: pure functions on arrays. scipy is imported here alone."""

from __future__ import annotations

from divergence.errors import UsageError

__all__ = ["need_scipy"]


def need_scipy() -> None:
    """Raise UsageError where scipy is not installed."""
    try:
        import scipy.stats  # noqa: F401 - only to see whether it is there
    except ImportError as error:
        raise UsageError(
            "the statistics of scores need the package scipy",
            hint="pip install 'divergence-debug[scores]'",
        ) from error
