"""Who watches the supervised: beats and the kernel say who is stopped or wedged, status pages say who is sick.

A stopped active still holds its lock and its place, so nobody can take over before it is killed (facts 31e). The same
judge that moves streams in a frontend decides it here, from a beat connection of the supervisor's own. Frontends judge
for themselves and kill nobody; the supervisor kills, and moves no streams.

Always true: a process is killed for what the kernel or it itself said, never for silence alone; silence counts only
in this loop's own on-time ticks, so a starved supervisor kills nobody; a verdict holds for the very process it was
made of, by pid, and a new process begins with a new judge.
"""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.ports import Network
from holdfast.core.procfs import boot_id, is_ending, pid_namespace, read_process
from holdfast.health.liveness import TICK_S, Judge, stopped_reason
from holdfast.health.probe import is_local, probe
from holdfast.health.verdicts import Effect, Judged, StartProbe, StopProbe, Verdict
from holdfast.streams.beat_link import BeatConnection
from holdfast.supervise.asking import ask_status
from holdfast.supervise.jobs import Slot
from holdfast.supervise.life import Phase
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.probes import Probes, answer_of, weigh
from holdfast.wire.messages import ProcessIdentity

CONNECT_S = 2.0  # a beat thread answers at once; one that does not is tried again
# Between tries to open a beat connection: the judge's first doubt comes later than two of them.
REOPEN_S = 0.2
# One that has no beats (a store, a vault, a frontend), or never answered a beat connection (adopted while stopped,
# say), has none to miss. The kernel's word alone counts, for as long as an idle worker may be silent: a debugger's
# short stop is no death.
STOPPED_TICKS = 15
CONDEMNED = (Verdict.STOPPED, Verdict.WEDGED)  # GONE is not among them: its host may only be out of sight


class KernelWatch:
    """One process without beats, judged by the kernel's word alone: stopped, for long enough to be no accident."""

    def __init__(self, slot: Slot, supervisor: Supervisor) -> None:
        self.slot = slot
        self._supervisor = supervisor
        self._pid = 0
        self._stopped_ticks = 0

    def tick(self) -> None:
        life = self.slot.life
        if life.pid != self._pid or life.phase is not Phase.READY:
            self._pid, self._stopped_ticks = life.pid, 0
            return
        why = stopped_reason(probe(_identity_of(self._pid)))
        self._stopped_ticks = self._stopped_ticks + 1 if why and not is_ending(self._pid) else 0
        if self._stopped_ticks >= STOPPED_TICKS:
            self._supervisor.condemn(self.slot, self._pid, f"is stopped: {why}")


class BeatWatch:
    """One worker's beats, and the judge that weighs them."""

    def __init__(self, slot: Slot, supervisor: Supervisor, network: Network) -> None:
        self.slot = slot
        self._supervisor = supervisor
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._kernel = KernelWatch(slot, supervisor)  # for one that was never heard
        self._begin(0)

    def _begin(self, pid: int) -> None:
        self.judge = Judge(self.slot.job.name)
        self._pid = pid
        self._identity: ProcessIdentity | None = None
        self._beat: BeatConnection | None = None
        self._probing = False

    def _is_due(self) -> bool:
        return self.slot.life.phase is Phase.READY

    async def keep(self) -> None:
        """Hold a beat connection to whoever is the job's ready process, for ever."""
        while True:
            await self._supervisor.wait(self._is_due)
            with contextlib.suppress(OSError):
                await self._listen(self.slot.life.pid)
            await asyncio.sleep(REOPEN_S)

    async def _listen(self, pid: int) -> None:
        """Until the connection ends; OSError if there is none to be had."""
        beat = BeatConnection("supervisor")
        try:
            address = parse_address(self.slot.job.beat_address)
            await self._network.connect(address, lambda: beat, CONNECT_S)
            welcome = await beat.welcome(CONNECT_S)
            if (welcome.process.pid, self.slot.life.pid) != (pid, pid):
                raise ConnectionError("another process answers at its address")
            if self._pid != pid:
                self._begin(pid)
            self._beat, self._identity = beat, welcome.process
            self._perform(self.judge.on_connected(self._loop.time(), is_local(welcome.process)))
            await asyncio.shield(beat.lost)
            if self._beat is beat:
                self._beat = None
                self._perform(self.judge.on_disconnected(self._loop.time()))
        finally:
            beat.close()

    def tick(self, now_s: float) -> None:
        """The supervisor's own tick. What was received is told before what was not."""
        life, judge = self.slot.life, self.judge
        if life.phase is not Phase.READY:
            return
        if life.pid != self._pid:
            self._begin(life.pid)
            return
        if judge.verdict is Verdict.NEW:
            self._kernel.tick()
            return
        if self._beat is not None:
            for beat in self._beat.beats:
                self._perform(judge.on_beat(now_s, beat))
            self._beat.beats.clear()
        self._perform(judge.on_tick(now_s, False))
        if self._probing and self._identity is not None:
            self._perform(judge.on_probe(now_s, probe(self._identity)))

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, StartProbe | StopProbe):
                self._probing = isinstance(effect, StartProbe)
            elif isinstance(effect, Judged) and effect.after in CONDEMNED and not is_ending(self._pid):
                self._supervisor.condemn(self.slot, self._pid, f"is {effect.after}: {effect.reason}")

    def __repr__(self) -> str:
        return f"<BeatWatch {self.judge!r}>"


def _identity_of(pid: int) -> ProcessIdentity:
    """A process of this machine whose beat thread is not known."""
    stat = read_process(pid)
    return ProcessIdentity(boot_id(), pid_namespace(), pid, stat.start_ticks if stat is not None else 0, 0)


class Watching:
    """Watches all jobs of a supervisor that can be watched. `run` it beside the supervisor, in a task group."""

    def __init__(self, supervisor: Supervisor, network: Network) -> None:
        self._supervisor = supervisor
        self._network = network
        slots = list(supervisor.slots.values())
        self.beats = [BeatWatch(slot, supervisor, network) for slot in slots if _can_be_heard(slot.job.beat_address)]
        unheard = [slot for slot in slots if not _can_be_heard(slot.job.beat_address)]
        self._seen = [KernelWatch(slot, supervisor) for slot in unheard]
        self._asked = [(slot, slot.job.probes) for slot in slots if slot.job.probes is not None]

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self.beats:
                tasks.create_task(watch.keep())
            for slot, probes in self._asked:
                tasks.create_task(self._ask(slot, probes))
            tasks.create_task(self._tick())
            tasks.create_task(self._supervisor.witness.run(self._network))
            tasks.create_task(self._supervisor.witness.look_on())
            tasks.create_task(self._supervisor.parts.run())

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            for watch in self.beats:
                watch.tick(loop.time())
            for seen in self._seen:
                seen.tick()

    async def _ask(self, slot: Slot, probes: Probes) -> None:
        while True:
            await self._supervisor.wait(lambda: slot.life.phase is Phase.READY)
            await asyncio.sleep(probes.period_s)
            await self._ask_once(slot, probes)

    async def _ask_once(self, slot: Slot, probes: Probes) -> None:
        pid, status = slot.life.pid, self._supervisor.status_address(slot)
        if not status:
            return
        address = parse_address(status)
        paths = ("/live", "/health")
        (live, reason), (ready, _) = await asyncio.gather(
            *(ask_status(address, self._network, probes.timeout_s, path) for path in paths)
        )
        if slot.life.pid != pid or slot.life.phase is not Phase.READY:
            return
        slot.asked, why = weigh(slot.asked, answer_of(live), answer_of(ready), probes, reason)
        if why:
            self._supervisor.condemn(slot, pid, why)


def _can_be_heard(beat_address: str) -> bool:
    """A port that is only chosen by the process itself is not known here."""
    if not beat_address:
        return False
    address = parse_address(beat_address)
    return not isinstance(address, TcpAddress) or address.port != 0
