"""What the leading rank tells the others, call by call, over one stream socket each.

A call is a method of vLLM's worker with its arguments, pickled as between vLLM's own processes: the socket pair is
theirs alone. Always true: calls are made in the order they were told, and a call's acts are done before it, so that
what it may write is open on every rank.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.engines.shadow.acts import Act
from holdfast.engines.shadow.frames import received, send


@dataclass(frozen=True, slots=True)
class Told:
    acts: list[Act]
    method: str = ""  # of vLLM's worker; none: the acts are all
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    answered: bool = True
    at_rest: bool = False  # the answer is given when the device has nothing left to do


def tell(ranks: Sequence[socket.socket], told: Told) -> None:
    send(ranks, pickle.dumps(told, pickle.HIGHEST_PROTOCOL))


def heard(leader: socket.socket) -> Told | None:
    """Wait for the next words; None: the leader is gone."""
    body = received(leader)
    return pickle.loads(body) if body else None


def answer(leader: socket.socket, value: Any) -> None:
    send((leader,), pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def answers(ranks: Sequence[socket.socket]) -> list[Any]:
    """What each of them answers; ConnectionError where one is gone."""
    found = []
    for rank in ranks:
        body = received(rank)
        if not body:
            raise ConnectionError("a rank is gone")
        found.append(pickle.loads(body))
    return found
