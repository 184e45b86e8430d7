"""The real world, for those who make processes."""

from __future__ import annotations

import random

from holdfast.core.clock import SystemClock
from holdfast.core.ports import World
from holdfast.wire.net import SocketNetwork


def real_world(rng: random.Random | None = None) -> World:
    """Sockets, the kernel's clocks, and a generator that the system seeds unless one is given."""
    return World(SocketNetwork(), SystemClock(), rng or random.Random())
