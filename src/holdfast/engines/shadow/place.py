"""Where a shadow engine's memory is, what it is called there, and how it waits beside it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spec.waits import WAKE_S


@dataclass(frozen=True, slots=True)
class Place:
    vault_socket: str
    device: str = "host-0"
    engine_id: int = 0
    who: str = "engine"
    unmapped: bool = False  # stand by without mappings
    direct: bool = False  # KV in memory of its own
    wake_s: float = WAKE_S
    load_s: float = 7200.0  # for the weights to be there: from a slow disk, or over a network, hours
    vault_uids: tuple[int, ...] = ()  # whose vault it may be, besides this user's and root's
    more: tuple[tuple[str, str], ...] = ()  # vault socket and device of ranks 1, 2, …
