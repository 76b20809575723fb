"""Hand-made answers and toy runs, shared by all that compares."""

from tests.shared_fixtures import *  # noqa: F403
