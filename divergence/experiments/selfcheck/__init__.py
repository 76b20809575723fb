"""One machine against itself: the same run made in other ways that must not matter."""
