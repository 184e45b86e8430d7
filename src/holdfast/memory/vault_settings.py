"""How one vault runs; travels as JSON on its command line."""

from __future__ import annotations

from pathlib import Path

import msgspec

LIVE = "live"
ENDED = "ended"


class VaultSettings(msgspec.Struct, frozen=True):
    """One device's vault."""

    device: str
    socket_path: str
    budget_bytes: int = 0  # for weights and pool together; 0: whatever the writers can allocate
    allowed_uids: tuple[int, ...] = ()  # besides the vault's own
    status_address: str = ""  # where /metrics is served; empty: nowhere

    @property
    def marker(self) -> Path:
        """Says LIVE once a vault has served and ENDED after a clean end: tells a first start from a total loss."""
        return Path(self.socket_path + ".state")

    @property
    def lock(self) -> Path:
        """Whoever holds it is the vault of this socket."""
        return Path(self.socket_path + ".lock")

    def marked(self, text: str) -> bool:
        try:
            return self.marker.read_text() == text
        except FileNotFoundError:
            return False
