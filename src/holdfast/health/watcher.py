"""Watches one process by its beats: a connection for them, looks at /proc where it is doubted, and the judge.

Who watches (a frontend its workers, a supervisor its jobs) ticks the watcher ten times a second and is told of every
change of verdict; what follows from one is its own affair. Looking reads a few small files under /proc and the cgroup
tree: what the kernel knows and no beat can tell (facts 31c). It never waits on the process.

Always true: the judge hears of a beat connection only once it is welcomed by the very process that is meant; what was
received is told before what was not; after `begin_anew` nothing of what was judged before counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.core.procfs import boot_id, is_frozen, pid_namespace, read_process, read_text
from holdfast.health.liveness import (
    Ask,
    Connected,
    Disconnected,
    Event,
    Judge,
    Judged,
    MoveStreams,
    ProbeResult,
    StartProbe,
    StopProbe,
    Tick,
    Traffic,
)
from holdfast.wire.framed import Framed
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import Beat, Failing, ProcessIdentity, Welcome, decode_to_frontend

CONNECT_TIMEOUT_S = 2.0  # a beat thread answers at once; one that does not is tried again
# Between tries to open a beat connection: the judge's first doubt comes later than two of them.
REOPEN_S = 0.2
# Beats come ten times a second at most, and are taken as often.
BEATS_MAX = 64
REASON_CHARS_MAX = 200  # of a worker's last words: people read them in one line

Finding = Judged | MoveStreams


def is_local(identity: ProcessIdentity) -> bool:
    """Can this process be looked at from here? A pid says something only in its own boot and namespace."""
    if not identity.boot_id or not identity.pid_namespace:
        return False
    if (identity.boot_id, identity.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    # Hidden by hidepid, or already dead and its pid someone else's: neither may be judged by what we see.
    stat = read_process(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks


def own_identity(beat_thread: int) -> ProcessIdentity:
    """Where an observer on this machine can look at this process. `beat_thread` is a native thread id."""
    stat = read_process(os.getpid())
    assert stat is not None, "/proc is not mounted, or does not show this process"
    return ProcessIdentity(boot_id(), pid_namespace(), os.getpid(), stat.start_ticks, beat_thread)


def probe(identity: ProcessIdentity) -> ProbeResult:
    """One look. Only meaningful where `is_local`."""
    stat = read_process(identity.pid)
    if stat is None or stat.start_ticks != identity.start_ticks:
        return ProbeResult(gone=True)
    state, switches = _thread(identity.pid, identity.beat_thread)
    return ProbeResult(
        gone=False, state=stat.state, frozen=is_frozen(identity.pid), thread_state=state, switches=switches
    )


def _thread(pid: int, thread: int) -> tuple[str, int]:
    """State letter and context switches of one thread; ("", 0) if it is gone."""
    text = read_text(f"/proc/{pid}/task/{thread}/status") or ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    switches = sum(int(fields.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))
    return fields.get("State", "").strip()[:1], switches


class BeatConnection(Framed):
    """Beats in, from a thread that does nothing else."""

    purpose = "beat"

    def __init__(self, peer: str, on_failing: Callable[[str], None]) -> None:
        super().__init__(peer)
        self._on_failing = on_failing
        self.beats: list[Beat] = []  # since the last tick

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                message = decode_to_frontend(payload)
                if isinstance(message, Beat):
                    self.beats.append(message)
                    del self.beats[:-BEATS_MAX]
                elif isinstance(message, Failing) and self.welcomed.done():
                    self._on_failing(message.reason[:REASON_CHARS_MAX])
                else:
                    self._first(message)
        except FrameError as error:
            self._break(f"worker sent what is not our protocol: {error}")


class BeatWatcher:
    """One process under watch. `check` raises ConnectionError for a welcome of anybody else; `ask` sends it a `Ping`,
    if there is a data connection to it; `on_failing` hears why it exits, if it says so."""

    def __init__(
        self,
        *,
        name: str,
        address: str,
        network: Network,
        peer: str,
        check: Callable[[Welcome], None],
        on_finding: Callable[[Finding], None],
        ask: Callable[[], None] | None = None,
        on_failing: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.judge = Judge(name)
        self._ask = ask
        self._on_failing = on_failing
        self._address = address
        self._network = network
        self._peer = peer
        self._check = check
        self._on_finding = on_finding
        self._loop = asyncio.get_running_loop()
        self._beat: BeatConnection | None = None
        self._identity: ProcessIdentity | None = None
        self._probing = False
        self.last: Beat | None = None  # the latest there was

    async def open(self) -> None:
        """Connect to the process's beat thread; OSError or TimeoutError if it does not answer."""
        beat = BeatConnection(self._peer, self._on_failing)
        try:
            await self._network.connect(parse_address(self._address), lambda: beat, CONNECT_TIMEOUT_S)
            welcome = await beat.welcome(CONNECT_TIMEOUT_S)
            self._check(welcome)
        except BaseException:
            beat.close()
            raise
        self._beat, self._identity = beat, welcome.process
        answers = self._ask is not None and welcome.load > 0  # an older version would not know the question
        self._tell(Connected(is_local(welcome.process), answers), self._loop.time())

    async def keep(self, due: Callable[[], Awaitable[None]] | None = None) -> None:
        """Hold a beat connection for ever, and open another where it broke; `due` returns when there is one to have."""
        while True:
            if due is not None:
                await due()
            with contextlib.suppress(OSError, ValueError):  # an address may be none
                if self._beat is None:
                    await self.open()
                await self._lost()
            await asyncio.sleep(REOPEN_S)

    async def _lost(self) -> None:
        beat = self._beat
        assert beat is not None, self
        try:
            await asyncio.shield(beat.lost)
        finally:
            beat.close()
        if self._beat is beat:
            self._beat = None
            self._tell(Disconnected(), self._loop.time())

    def begin_anew(self) -> None:
        """Another process, or another session with it: all that was judged is void."""
        if self._beat is not None:
            self._beat.close()
            self._beat = None
        self._identity, self._probing = None, False
        self.judge = Judge(self.judge.name)

    def hear(self) -> None:
        """A sign of life from elsewhere: one that was doubted is trusted in this moment."""
        self._tell(Traffic(), self._loop.time())

    def tick(self, now_s: float, *, heard: bool = False, streams_open: bool = False) -> None:
        """The observer's own tick; `heard`: it had a sign of life from elsewhere since the last."""
        if heard:
            self._tell(Traffic(), now_s)
        if self._beat is not None:
            for beat in self._beat.beats:
                self.last = beat
                self._tell(beat, now_s)
            self._beat.beats.clear()
        self._tell(Tick(streams_open), now_s)
        if self._probing and self._identity is not None:
            self._tell(probe(self._identity), now_s)

    def _tell(self, event: Event, now_s: float) -> None:
        for effect in self.judge.step(event, now_s):
            if isinstance(effect, StartProbe | StopProbe):
                self._probing = isinstance(effect, StartProbe)
            elif isinstance(effect, Ask):
                if self._ask is not None:
                    self._ask()
            else:
                self._on_finding(effect)

    def __repr__(self) -> str:
        return f"<BeatWatcher {self.judge!r}>"
