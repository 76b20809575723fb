"""A policy by path or name, read and held against its bounds."""

from __future__ import annotations

import os

import msgspec

from divergence.config import decode, find_config, load_toml
from divergence.gate.bounds import check_bounds
from divergence.gate.policy import Policy

__all__ = ["DEFAULT_POLICY", "load_policy"]

DEFAULT_POLICY = "ci"


def load_policy(policy: Policy | str | os.PathLike[str] | None = None) -> Policy:
    """A policy by path or name; ``None`` is configs/ci.toml."""
    if isinstance(policy, Policy):
        check_bounds(policy, where=policy.name or "the policy")
        return policy
    wanted = DEFAULT_POLICY if policy is None else policy
    path = find_config(wanted, what="policy")
    loaded = decode(load_toml(path), Policy, where=str(path))
    check_bounds(loaded, where=str(path))
    return msgspec.structs.replace(loaded, name=loaded.name or path.stem)
