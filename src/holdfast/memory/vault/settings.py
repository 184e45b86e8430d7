"""Settings of one vault, passed as JSON on its command line."""

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
    device: str
    socket_path: str
    budget_bytes: int = 0  # for weights and pool together; 0: no limit
    host_budget_bytes: int = 0  # host memory for demoted weights; 0: no demotion
    # True: others use the device's memory while its weights are in host memory. If lost there, they are not reloaded.
    leased: bool = False
    allowed_uids: tuple[int, ...] = ()  # besides the vault's own
    status_address: str = ""  # where /metrics is served; empty: nowhere
    # After vault and keeper both died: how long engines have to donate the weights and the pool they still map,
    # before new ones are made. A living owner reconnects as soon as the socket answers; if the owner died too, its
    # streams stall for this time.
    weights_donation_s: float = 3.0
    pool_donation_s: float = 1.0

    @property
    def marker(self) -> Path:
        """Return the path of the marker file, which distinguishes a first start from a total loss.

        It contains LIVE once a vault has served, WARM while the weights are only in host memory, ENDED after a clean
        end."""
        return Path(self.socket_path + ".state")

    @property
    def lock(self) -> Path:
        """Return the path of the lock file. The process that holds the lock is the vault of this socket."""
        return Path(self.socket_path + ".lock")

    def marked(self, text: str) -> bool:
        try:
            return self.marker.read_text().strip() == text
        except FileNotFoundError:
            return False

    def mark(self, text: str) -> None:
        """Overwrite the marker in place, which needs no disk space. If this fails, the next vault takes a total loss
        for a first start and does not wait for engines to donate memory."""
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
