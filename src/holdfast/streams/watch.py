"""One worker under watch: its link, its beat connection, and the judge that weighs what comes and what does not.

Always true: the judge hears of a beat connection only once it is welcomed by the very worker the link speaks of;
what was received is told before what was not; a new data connection begins with a new judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.core.address import parse_address
from holdfast.core.errors import Code
from holdfast.core.ports import Network
from holdfast.health.liveness import Judge
from holdfast.health.probe import is_local, probe
from holdfast.health.verdicts import Effect, Judged, MoveStreams, StartProbe, StopProbe
from holdfast.streams.beat_link import BeatConnection
from holdfast.streams.link import WorkerLink

CONNECT_TIMEOUT_S = 2.0
# Between tries to reopen a broken beat connection: the judge's first doubt comes later than two of them.
REOPEN_S = 0.2


class Watch:
    """A link with what watches it; `on_judged` is told of every change of verdict, before streams are moved."""

    def __init__(
        self, link: WorkerLink, network: Network, peer: str, on_judged: Callable[[Watch, Judged], None]
    ) -> None:
        self.link = link
        self.judge = Judge(link.instance.name)
        self._network = network
        self._peer = peer
        self._on_judged = on_judged
        self._loop = asyncio.get_running_loop()
        self._beat: BeatConnection | None = None
        self._probing = False
        link.on_word = self._hear

    async def open_beats(self) -> None:
        """Connect to the worker's beat thread; OSError or TimeoutError if it does not answer."""
        beat = BeatConnection(self._peer)
        try:
            address = parse_address(self.link.instance.record.beat_address)
            await self._network.connect(address, lambda: beat, CONNECT_TIMEOUT_S)
            welcome = await beat.welcome(CONNECT_TIMEOUT_S)
            self.link.check(welcome)
        except BaseException:
            beat.close()
            raise
        self._beat = beat
        self._perform(self.judge.on_connected(self._loop.time(), is_local(welcome.process)))

    async def keep_beats(self) -> None:
        """Reopen a broken beat connection while the data connection stands."""
        while True:
            if self._beat is not None:
                await asyncio.shield(self._beat.lost)
                self._beat = None
                self._perform(self.judge.on_disconnected(self._loop.time()))
            await asyncio.sleep(REOPEN_S)
            try:
                await self.open_beats()
            except OSError:
                continue

    def reset(self) -> None:
        """The data connection is over, and with it all that was judged."""
        if self._beat is not None:
            self._beat.close()
            self._beat = None
        self._probing = False
        self.judge = Judge(self.judge.name)

    def _hear(self) -> None:
        """A sign of life on the data connection that is told at once: one that was doubted gets work in this moment."""
        self._perform(self.judge.on_traffic(self._loop.time()))

    def tick(self, now_s: float) -> None:
        """The observer's own tick."""
        link, judge = self.link, self.judge
        if link.heard:
            link.heard = False
            self._perform(judge.on_traffic(now_s))
        if self._beat is not None:
            for beat in self._beat.beats:
                self._perform(judge.on_beat(now_s, beat))
            self._beat.beats.clear()
        self._perform(judge.on_tick(now_s, bool(link.streams)))
        if self._probing and link.welcome is not None:
            self._perform(judge.on_probe(now_s, probe(link.welcome.process)))

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, StartProbe):
                self._probing = True
            elif isinstance(effect, StopProbe):
                self._probing = False
            elif isinstance(effect, MoveStreams):
                self.link.fail_streams(Code.RESPONSE_TIMEOUT, effect.reason, tell_worker=True)
            elif isinstance(effect, Judged):
                self._on_judged(self, effect)

    def __repr__(self) -> str:
        return f"<Watch {self.link!r}, {self.judge!r}>"
