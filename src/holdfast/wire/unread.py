"""Whether a peer takes what is sent to it. How much is sent at once says nothing about it: a burst may be large, and a
peer on a slow or busy machine may be far behind and catch up. One that takes nothing at all is stopped or gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.wire.net import Outgoing

# Below this nobody is looked at: the memory does not matter, and whether the peer lives is for others to judge. A peer
# that takes nothing of what waits above it for so long is never going to.
UNSENT_BYTES_MAX = 32 * 1024 * 1024
UNSENT_S = 5.0
LOOKS = 10  # in that time


class Unread:
    """Of one connection; `gives_up` is called with the reason, once, if its peer takes nothing for too long."""

    def __init__(self, gives_up: Callable[[str], None]) -> None:
        self._gives_up = gives_up
        self._loop = asyncio.get_running_loop()
        self._outgoing = Outgoing()
        self._looking = False

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send, and look after it while much is unsent."""
        self._outgoing.written += len(data)
        transport.write(data)
        if not self._looking and transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._looking = True
            self._look(transport)

    def _look(self, transport: asyncio.Transport) -> None:
        if transport.is_closing() or transport.get_write_buffer_size() <= UNSENT_BYTES_MAX:
            self._looking = False
        elif self._outgoing.stalled_s(transport, self._loop.time()) >= UNSENT_S:
            self._gives_up(f"took nothing for {UNSENT_S:g} s of what was sent to it")
        else:
            self._loop.call_later(UNSENT_S / LOOKS, self._look, transport)
