"""Watches one process through its beats: keeps the beat connection, probes /proc when the process is silent, and feeds
`WorkerLiveness`.

The observer (a frontend for its workers, a supervisor for its jobs) ticks the watcher ten times a second, and gets
every change of verdict. A probe reads a few small files under /proc and the cgroup tree, which show what no beat can
report (facts 31c). It never waits for the process.

Always true: `Connected` is stepped only after the welcome of the right process; received beats are passed on before
the tick that counts silence; after `reset` no earlier verdict counts.
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
    AskOnData,
    Connected,
    DataReceived,
    Disconnected,
    LivenessChanged,
    LivenessEvent,
    LivenessTick,
    MoveLostStreams,
    ProbeResult,
    SetProbing,
    WorkerLiveness,
)
from holdfast.wire.messages import Beat, Failing, ProcessIdentity, ToFrontend, Welcome
from holdfast.wire.worker_connection import WorkerConnection

CONNECT_TIMEOUT_S = 2.0  # a beat thread answers at once; if it does not, the watcher connects again
# Pause between attempts to open a beat connection: two fit in before a worker is SUSPECT.
REOPEN_S = 0.2
# Beats kept between two ticks: at most ten come in a second, and there are ten ticks.
BEATS_MAX = 64
REASON_CHARS_MAX = 200  # of a worker's reason for its exit: people read it in one line

Finding = LivenessChanged | MoveLostStreams


def is_local(identity: ProcessIdentity) -> bool:
    """Return True if this process can be probed from here: a pid is valid only in its own boot and namespace."""
    if not identity.boot_id or not identity.pid_namespace:
        return False
    if (identity.boot_id, identity.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    # /proc may hide the process (hidepid), or it is dead and its pid was reused: then /proc proves nothing about it.
    stat = read_process(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks


def own_identity(beat_thread: int) -> ProcessIdentity:
    """Return the identity with which an observer on this machine can probe this process. `beat_thread` is a native
    thread id."""
    stat = read_process(os.getpid())
    assert stat is not None, "/proc is not mounted, or does not show this process"
    return ProcessIdentity(boot_id(), pid_namespace(), os.getpid(), stat.start_ticks, beat_thread)


def probe(identity: ProcessIdentity) -> ProbeResult:
    """Read the process's state from /proc. Only meaningful where `is_local`."""
    stat = read_process(identity.pid)
    if stat is None or stat.start_ticks != identity.start_ticks:
        return ProbeResult(gone=True)
    state, switches = _thread(identity.pid, identity.beat_thread)
    return ProbeResult(
        gone=False, state=stat.state, frozen=is_frozen(identity.pid), thread_state=state, switches=switches
    )


def _thread(pid: int, thread: int) -> tuple[str, int]:
    """Return the state letter and context switches of one thread; ("", 0) if it is gone."""
    text = read_text(f"/proc/{pid}/task/{thread}/status") or ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    switches = sum(int(fields.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))
    return fields.get("State", "").strip()[:1], switches


class BeatConnection(WorkerConnection):
    """A connection that receives beats; the thread that sends them does nothing else."""

    purpose = "beat"

    def __init__(self, peer: str, on_failing: Callable[[str], None]) -> None:
        super().__init__(peer)
        self._on_failing = on_failing
        self.beats: list[Beat] = []  # since the last tick

    def on_message(self, message: ToFrontend) -> None:
        if isinstance(message, Beat):
            self.beats.append(message)
            del self.beats[:-BEATS_MAX]
        elif isinstance(message, Failing) and self.welcomed:
            self._on_failing(message.reason[:REASON_CHARS_MAX])
        else:
            super().on_message(message)


class BeatWatcher:
    """A watcher of one process. `check` raises ConnectionError for the welcome of another process; `ask` sends a `Ping`
    on the data connection, if there is one; `on_failing` gets the reason for the process's exit, if it sends one."""

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
        self.liveness = WorkerLiveness(name)
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
        self.last: Beat | None = None  # the latest beat

    async def open(self) -> None:
        """Connect to the process's beat thread. Raises OSError or TimeoutError if it does not answer."""
        beat = BeatConnection(self._peer, self._on_failing)
        try:
            await self._network.connect(parse_address(self._address), lambda: beat, CONNECT_TIMEOUT_S)
            welcome = await beat.welcome(CONNECT_TIMEOUT_S)
            self._check(welcome)
        except BaseException:
            beat.abort()
            raise
        self._beat, self._identity = beat, welcome.process
        answers = self._ask is not None and welcome.load > 0  # older versions do not know pings
        self._step(Connected(is_local(welcome.process), answers), self._loop.time())

    async def keep(self, due: Callable[[], Awaitable[None]] | None = None) -> None:
        """Keep a beat connection open until cancelled, reopening it when it breaks. `due` returns when the next attempt
        can be made."""
        while True:
            if due is not None:
                await due()
            with contextlib.suppress(OSError, ValueError):  # ValueError: the address is invalid
                if self._beat is None:
                    await self.open()
                await self._lost()
            await asyncio.sleep(REOPEN_S)

    async def _lost(self) -> None:
        beat = self._beat
        assert beat is not None, self
        try:
            await beat.closed.wait()
        finally:
            beat.abort()
        if self._beat is beat:
            self._beat = None
            self._step(Disconnected(), self._loop.time())

    def reset(self) -> None:
        """Discard the verdict, because there is another process or another session with it."""
        if self._beat is not None:
            self._beat.abort()
            self._beat = None
        self._identity, self._probing = None, False
        self.liveness = WorkerLiveness(self.liveness.name)

    def note_sign_of_life(self) -> None:
        """Note a sign of life from another connection, which ends the process's silence at once."""
        self._step(DataReceived(), self._loop.time())

    def tick(self, now_s: float, *, heard: bool = False, streams_open: bool = False) -> None:
        """Tick `liveness`. `heard`: a sign of life came on another connection since the last tick."""
        if heard:
            self._step(DataReceived(), now_s)
        if self._beat is not None:
            for beat in self._beat.beats:
                self.last = beat
                self._step(beat, now_s)
            self._beat.beats.clear()
        self._step(LivenessTick(streams_open), now_s)
        if self._probing and self._identity is not None:
            self._step(probe(self._identity), now_s)

    def _step(self, event: LivenessEvent, now_s: float) -> None:
        for effect in self.liveness.step(event, now_s):
            if isinstance(effect, SetProbing):
                self._probing = effect.on
            elif isinstance(effect, AskOnData):
                if self._ask is not None:
                    self._ask()
            else:
                self._on_finding(effect)

    def __repr__(self) -> str:
        return f"<BeatWatcher {self.liveness!r}>"
