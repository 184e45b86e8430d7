"""Which device each rank of each pair sits on, and the socket of its vault there. Pure.

Always true: no two vaults have one socket; host memory has a number of its own for every rank of every pair; GPUs go
round, in the order they were named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Seat:
    device: str
    socket_name: str  # as `spec.names.socket_path` takes it: the device's, but for a later vault on the same GPU


def seats(gpus: Sequence[str], pairs: int, ranks: int) -> list[list[Seat]]:
    """Every pair's ranks' seats; no GPUs: host memory."""
    return [[_seat(gpus, pair * ranks + rank) for rank in range(ranks)] for pair in range(pairs)]


def _seat(gpus: Sequence[str], number: int) -> Seat:
    if not gpus:
        return Seat(f"host-{number + 1}", f"host-{number + 1}")
    turn, place = divmod(number, len(gpus))
    return Seat(gpus[place], f"{gpus[place]}.{turn + 1}" if turn else gpus[place])


def pairs_on(taken: Sequence[Sequence[Seat]]) -> int:
    """How many pairs share the most wanted device."""
    return max(Counter(seat.device for pair in taken for seat in pair).values(), default=0)


def check_seats(gpus: Sequence[str], pairs: int, ranks: int, kv_gib: float) -> None:
    """UserError where there are too few GPUs; host memory is never too few, only too small."""
    if not gpus:
        return
    if ranks > len(gpus):
        raise UserError(
            f"--ranks {ranks} needs as many GPUs, and there are {len(gpus)} ({', '.join(gpus)}); "
            "name more with --device, or use fewer ranks"
        )
    shared = pairs_on(seats(gpus, pairs, ranks))
    if shared > 1 and not kv_gib:
        raise UserError(
            f"--workers {pairs} puts {shared} workers on one GPU; name more with --device, use fewer --workers, "
            "or say with --kv-gib how much of it each of their KV pools may have"
        )
