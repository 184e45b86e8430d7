"""How one vault runs; travels as JSON on its command line."""

from __future__ import annotations

from pathlib import Path

import msgspec


class VaultSettings(msgspec.Struct, frozen=True):
    """One device's vault."""

    device: str
    socket_path: str
    budget_bytes: int = 0  # for weights and pool together; 0: whatever the writers can allocate
    allowed_uids: tuple[int, ...] = ()  # besides the vault's own

    @property
    def marker(self) -> Path:
        """There while a vault of this socket has not ended cleanly: tells a first start from a total loss."""
        return Path(self.socket_path + ".live")
