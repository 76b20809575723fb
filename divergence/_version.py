"""The version, in one place: pyproject.toml and every manifest read it from here."""

__version__ = "0.1.0"
