"""Who watches the supervised: beats and the kernel say who is stopped or wedged, status pages say who is sick.

A stopped active still holds its lock and its place, so nobody can take over before it is killed (facts 31e). The same
watcher that moves streams in a frontend decides it here, on a beat connection of the supervisor's own. Frontends judge
for themselves and kill nobody; the supervisor kills, and moves no streams.

Always true: a process is killed for what the kernel or its own beats show, or after 10 s of silence though it could
run; silence counts only in this loop's own on-time ticks, so a starved supervisor kills no process; a verdict holds for
the very process it was made of, by pid, and a new process begins with fresh liveness.
"""

from __future__ import annotations

import asyncio

from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.ports import Network
from holdfast.core.procfs import boot_id, is_ending, pid_namespace, read_process
from holdfast.health.liveness import TICK_S, Liveness, LivenessChanged, stopped_reason
from holdfast.health.watcher import BeatWatcher, Finding, probe
from holdfast.spec.launch import Probes
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase, answer_of, weigh
from holdfast.supervise.slots import Slot
from holdfast.supervise.status_client import get_status
from holdfast.wire.messages import ProcessIdentity, Welcome

# One that has no beats (a store, a vault, a frontend), or never answered a beat connection (adopted while stopped,
# say), has none to miss. The kernel's word alone counts, for as long as an idle worker may be silent: a debugger's
# short stop is no death.
STOPPED_TICKS = 15
CONDEMNED = (
    Liveness.STOPPED,
    Liveness.WEDGED,
)  # GONE is not among them: its host may only be out of sight


class JobWatch:
    """One job's ready process: judged by its beats, or, until any was heard, by the kernel's word alone."""

    def __init__(self, slot: Slot, supervisor: Supervisor, network: Network) -> None:
        self.slot = slot
        self._supervisor = supervisor
        self._pid = 0
        self._stopped_ticks = 0
        self.beats: BeatWatcher | None = None
        if _can_be_heard(slot.job.beat_address):
            self.beats = BeatWatcher(
                name=slot.job.name,
                address=slot.job.beat_address,
                network=network,
                peer="supervisor",
                check=self._check,
                on_finding=self._found,
            )

    async def due(self) -> None:
        """Returns when the job has a ready process, whose beats may be heard from now on."""
        await self._supervisor.wait(lambda: self.slot.life.phase is Phase.READY)
        self._follow()

    def _follow(self) -> bool:
        """Whether the job's process is still the one that is watched; if not, another begins with fresh liveness."""
        if self.slot.life.pid == self._pid:
            return True
        self._pid, self._stopped_ticks = self.slot.life.pid, 0
        if self.beats is not None:
            self.beats.reset()
        return False

    def _check(self, welcome: Welcome) -> None:
        if (welcome.process.pid, self.slot.life.pid) != (self._pid, self._pid):
            raise ConnectionError("another process answers at its address")

    def tick(self, now_s: float) -> None:
        """The supervisor's own tick."""
        if self.slot.life.phase is not Phase.READY:
            self._stopped_ticks = 0
        elif self._follow():
            if self.beats is not None and self.beats.liveness.state is not Liveness.NEW:
                self.beats.tick(now_s)
            else:
                self._ask_kernel()

    def _ask_kernel(self) -> None:
        why = stopped_reason(probe(_identity_of(self._pid)))
        self._stopped_ticks = self._stopped_ticks + 1 if why and not is_ending(self._pid) else 0
        if self._stopped_ticks >= STOPPED_TICKS:
            self._supervisor.condemn(self.slot, self._pid, f"is stopped: {why}")

    def _found(self, finding: Finding) -> None:
        if isinstance(finding, LivenessChanged) and finding.after in CONDEMNED and not is_ending(self._pid):
            self._supervisor.condemn(self.slot, self._pid, f"is {finding.after}: {finding.reason}")


def _identity_of(pid: int) -> ProcessIdentity:
    """A process of this machine whose beat thread is not known."""
    stat = read_process(pid)
    return ProcessIdentity(boot_id(), pid_namespace(), pid, stat.start_ticks if stat is not None else 0, 0)


class Watching:
    """Watches all jobs of a supervisor that can be watched. `run` it beside the supervisor, in a task group."""

    def __init__(self, supervisor: Supervisor, network: Network) -> None:
        self._supervisor = supervisor
        self._network = network
        self.watched: dict[str, JobWatch] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick(tasks))
            tasks.create_task(self._supervisor.witness.run(self._network))
            tasks.create_task(self._supervisor.witness.listen(self._network))
            tasks.create_task(self._supervisor.witness.look_on())
            tasks.create_task(self._supervisor.parts.run())

    async def _tick(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._meet(tasks)
            await asyncio.sleep(TICK_S)
            for watch in self.watched.values():
                watch.tick(loop.time())

    def _meet(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to watch jobs that have come, and end it of those that are gone."""
        slots = self._supervisor.slots
        for name in [name for name, watch in self.watched.items() if slots.get(name) is not watch.slot]:
            del self.watched[name]
            for task in self._tasks.pop(name):
                task.cancel()
        for name in slots.keys() - self.watched.keys():
            watch = self.watched[name] = JobWatch(slots[name], self._supervisor, self._network)
            probes, began = watch.slot.job.probes, self._tasks.setdefault(name, [])
            if watch.beats is not None:
                began.append(tasks.create_task(watch.beats.keep(watch.due)))
            if probes is not None:
                began.append(tasks.create_task(self._ask(watch.slot, probes)))

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
            *(get_status(address, self._network, probes.timeout_s, path) for path in paths)
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
