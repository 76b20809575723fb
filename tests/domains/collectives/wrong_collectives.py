"""Collectives with a fault each, for ``--impl``: one rank's tensor in, its result out."""

import torch
import torch.distributed as dist

_calls: dict[tuple[torch.dtype, int], int] = {}


def _all(x: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return out


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def _mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def own_first(x: torch.Tensor) -> torch.Tensor:
    """Every rank adds all terms itself, its own first."""
    parts, rank = _all(x), dist.get_rank()
    return _sum([parts[rank], *parts[:rank], *parts[rank + 1 :]])


def average(x: torch.Tensor) -> torch.Tensor:
    return _sum(_all(x)) / dist.get_world_size()


def first_alone(x: torch.Tensor) -> torch.Tensor:
    return _all(x)[0]


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def lacks_1(x: torch.Tensor) -> torch.Tensor:
    parts = _all(x)
    return _sum([parts[0], *parts[2:]])


def twice_1(x: torch.Tensor) -> torch.Tensor:
    parts = _all(x)
    return _sum([*parts, parts[1]])


def lacks_1_at_times(x: torch.Tensor) -> torch.Tensor:
    """In every third call of one size."""
    key = (x.dtype, x.numel())
    _calls[key] = _calls.get(key, 0) + 1
    return lacks_1(x) if _calls[key] % 3 == 0 else _sum(_all(x))


def scattered_at_times(x: torch.Tensor) -> torch.Tensor:
    return _mine(lacks_1_at_times(x))


def sent_in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Added in the dtype of the buffer."""
    return _sum(_all(x.to(torch.bfloat16).to(x.dtype)))


def lost_tail(x: torch.Tensor) -> torch.Tensor:
    """On all ranks."""
    total = _sum(_all(x))
    total[-17:] = 0
    return total


def wide(x: torch.Tensor) -> torch.Tensor:
    """Added in float32, and rounded once."""
    return _sum([part.float() for part in _all(x)]).to(x.dtype)


def gathered_wrong_from_1(x: torch.Tensor) -> torch.Tensor:
    """What rank 1 sends is wrong everywhere but on itself."""
    parts = _all(x)
    return torch.cat([part * 2 if _from_1(giver) else part for giver, part in enumerate(parts)])


def dealt_wrong_from_1(x: torch.Tensor) -> torch.Tensor:
    parts = [_mine(part) for part in _all(x)]
    return torch.cat([part * 2 if _from_1(giver) else part for giver, part in enumerate(parts)])


def _from_1(giver: int) -> bool:
    return giver == 1 and dist.get_rank() != 1


def sent_by_1(x: torch.Tensor) -> torch.Tensor:
    """A broadcast from another root."""
    return _all(x)[1]


def too_short(x: torch.Tensor) -> torch.Tensor:
    return x[:-1].clone()


def none(x: torch.Tensor) -> None:
    return None


def in_float64(x: torch.Tensor) -> torch.Tensor:
    return x.double()
