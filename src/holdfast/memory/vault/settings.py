"""How one vault runs; travels as JSON on its command line."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

LIVE = "live"
ENDED = "ended"
WARM = "warm"


class VaultSettings(msgspec.Struct, frozen=True):
    """One device's vault."""

    device: str
    socket_path: str
    budget_bytes: int = 0  # for weights and pool together; 0: whatever the writers can allocate
    host_budget_bytes: int = 0  # of host memory for weights that were demoted; 0: none are
    # Others have its device's memory while its weights are in host memory: lost there, they are not written anew.
    leased: bool = False
    allowed_uids: tuple[int, ...] = ()  # besides the vault's own
    status_address: str = ""  # where /metrics is served; empty: nowhere
    # After a loss of vault and keeper together, how long mapped engines have to give weights back before others are
    # written, and how long an owner that lives has to give its pool back before another one is made. It reattaches as
    # soon as the socket answers; and if it died too, its streams stand still for just as long.
    weights_donation_s: float = 3.0
    pool_donation_s: float = 1.0

    @property
    def marker(self) -> Path:
        """Says LIVE once a vault has served, WARM while its weights are in host memory only, ENDED after a clean end:
        tells a first start from a total loss."""
        return Path(self.socket_path + ".state")

    @property
    def lock(self) -> Path:
        """Whoever holds it is the vault of this socket."""
        return Path(self.socket_path + ".lock")

    def marked(self, text: str) -> bool:
        try:
            return self.marker.read_text().strip() == text
        except FileNotFoundError:
            return False

    def mark(self, text: str) -> None:
        """Over what stands there, which needs no room. Where it cannot be written, a total loss will look like a first
        start: the next vault then waits for nobody to give memory back."""
        if self.marked(text):
            return
        try:
            descriptor = os.open(self.marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, text.ljust(len(ENDED)).encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("cannot write %s: %s", self.marker, error)
