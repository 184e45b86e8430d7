"""The supervisor: starts jobs in order, hears at once when one ends, starts it again, adopts and replaces, stops all.

Every decision about one process is `machine.step`; here its effects are carried out, synchronously, in one place. Who
watches whether a process is well (`watching`) condemns it here; it is then killed, and comes back like one that died.

Always true: at most one process per job; what a process was started with is on disk before it starts, and who it is
right after, so the next supervisor finds it whenever this one is killed; frontends leave before the workers they talk
to, those before their memory, and the store leaves last, so that no stream breaks for want of a peer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from holdfast.core.errors import REFUSED
from holdfast.core.ports import Clock
from holdfast.core.tasks import done_within
from holdfast.spec.jobs import AT_LEISURE, START_ORDER, STOP_ORDER, Job
from holdfast.supervise import machine
from holdfast.supervise.incident_recorder import IncidentRecorder, PartProcesses
from holdfast.supervise.machine import KERNEL_S, Asked, Phase
from holdfast.supervise.processes import Process, Processes, exit_words
from holdfast.supervise.records import (
    Record,
    forget,
    read_launch,
    read_record,
    read_records,
    set_aside,
    write_launch,
)
from holdfast.supervise.slots import Slot, SlotRecords

# Records are files: while something starts they are looked at this often. Adds at most this much to "ready" on the
# screen, and nothing to the process's own readiness.
READY_POLL_S = 0.05
# For those whom the others need. Workers start without a store too, and wait for their vault themselves: waiting here
# only spares their logs a warning and, with a vault, an engine's first seconds.
PEERS_WAIT_S = 10.0
REPLACEABLE = (Phase.STARTING, Phase.READY, Phase.BACKING_OFF, Phase.CRASH_LOOP, Phase.REFUSED)
REPLACE_WAIT_S = 30.0  # for one replaced process to be ready before the next is taken down


class Supervisor:
    """Keeps jobs running until they are stopped. Use it inside one running event loop, in the main thread. `apart`:
    what it is called among several that share the state directory."""

    def __init__(
        self,
        state_dir: Path,
        jobs: Iterable[Job],
        processes: Processes,
        command: Callable[[Job, Path], Sequence[str]],
        *,
        tell: Callable[[str], None],
        clock: Clock,
        apart: str = "",
    ) -> None:
        self._state_dir = state_dir
        self._processes = processes
        self._command = command
        self._tell = tell
        self.slots = {job.name: Slot.of(job) for job in jobs}
        self.adopted: list[Record] = []
        self.witness = IncidentRecorder(state_dir, clock, apart)
        self.parts = PartProcesses(state_dir, processes, self.slots, self.witness)
        self._notes = SlotRecords(state_dir, tell)
        self._changed = asyncio.Event()
        self._polling: asyncio.TimerHandle | None = None

    # -- starting

    async def start(self) -> None:
        """Adopt what runs, start the rest in order, then replace what has other settings. Does not wait for ready."""
        outdated = self._adopt()
        for roles in START_ORDER:
            for slot in self.of(roles):
                if slot.life.phase is Phase.IDLE:
                    self.step(slot, machine.Start())
            if roles != START_ORDER[-1]:
                await self.wait(partial(self._are_past_starting, roles), PEERS_WAIT_S)
        for slot in outdated:
            await self._replace(slot)

    def start_late(self) -> None:
        """Start whom serving does not need, so that they take no time from those whom it does."""
        for slot in self.of(AT_LEISURE):
            if slot.life.phase is Phase.IDLE:
                self.step(slot, machine.Start())

    def adopt_everything(self) -> None:
        """Take over every live process of this state directory, hand-started ones too: to stop them."""
        for record in read_records(self._state_dir):
            slot = self.slots.setdefault(record.name, Slot.of(Job(record.name, record.role)))
            if not self._adopt_one(slot, record):
                self.slots.pop(record.name)
                forget(self._state_dir, record.name)

    def _adopt(self) -> list[Slot]:
        """Take over what an earlier supervisor left; returns those that were started with other settings."""
        outdated: list[Slot] = []
        for record in read_records(self._state_dir):
            if record.part_of and self._is_looked_after(record):
                continue
            written = read_launch(self._state_dir, record.name)
            if record.name not in self.slots:
                self._drop_surplus(record, supervised=written is not None or bool(record.part_of))
                continue
            slot = self.slots[record.name]
            if self._adopt_one(slot, record) and written != slot.job.settings:
                outdated.append(slot)
        return outdated

    def _is_looked_after(self, part: Record) -> bool:
        """Whether the process it belongs to lives; one that was killed may leave a stopped part behind."""
        whole = read_record(self._state_dir, part.part_of)
        return whole is not None and whole.alive

    def _adopt_one(self, slot: Slot, record: Record) -> bool:
        process = self._processes.adopt(record)
        if process is None:
            return False
        self.adopted.append(record)
        slot.record = record
        self._hold(slot, process)
        self.step(slot, machine.Adopted(record.pid, record.state == "ready"))
        return True

    def _drop_surplus(self, record: Record, supervised: bool) -> None:
        """Stop what an earlier `up` wanted and this one does not; a process started by hand is its starter's."""
        slot = Slot.of(Job(record.name, record.role))
        if not supervised:
            if record.alive:
                self._tell(f"{record.name} was started by hand, pid {record.pid}; left alone")
            return
        if not self._adopt_one(slot, record):
            forget(self._state_dir, record.name)
            return
        self.slots[record.name] = slot
        self.step(slot, machine.Stop(slot.job.stop_bound_s))

    async def _replace(self, slot: Slot) -> None:
        """One after the other, each ready before the next leaves (facts 21)."""
        if slot.life.phase in REPLACEABLE:
            self.step(slot, machine.Replace(slot.job.stop_bound_s))
        await self.wait(lambda: slot.life.phase in (Phase.READY, Phase.OVER), REPLACE_WAIT_S)

    # -- waiting

    async def wait(self, met: Callable[[], bool], bound_s: float | None = None) -> bool:
        """Wait until `met`; False if the bound passed first."""

        async def changes() -> None:
            while not met():
                await self._changed.wait()

        return await done_within(changes(), bound_s)

    def all_ready(self) -> bool:
        """Of those whom serving needs."""
        needed = [slot for slot in self.slots.values() if slot.job.role not in AT_LEISURE]
        return all(slot.life.phase in (Phase.READY, Phase.OVER) for slot in needed)

    # -- stopping

    async def stop(self) -> None:
        """Stop everything, peers last. Bounded by the sum of the stages' bounds."""
        for roles in STOP_ORDER:
            for slot in self.of(roles):
                self.step(slot, machine.Stop(slot.job.stop_bound_s))
            bound_s = max((slot.job.stop_bound_s for slot in self.of(roles)), default=0.0) + KERNEL_S
            await self.wait(partial(self._are_over, roles), bound_s)

    def kill(self) -> None:
        """Stop everything now."""
        for slot in self.slots.values():
            self.step(slot, machine.KillNow())

    def put_back(self) -> None:
        """Write down again what somebody removed."""
        for slot in self.slots.values():
            self._notes.put_back(slot)

    # -- condemning

    def condemn(self, slot: Slot, pid: int, why: str) -> None:
        """Kill and replace a process that is not well, if it is still the one that was judged."""
        if slot.life.pid == pid and slot.life.phase in (Phase.STARTING, Phase.READY):
            self.step(slot, machine.Condemned(why))

    def status_address(self, slot: Slot) -> str:
        """Where its present process shows its status; "" if it does not."""
        record = read_record(self._state_dir, slot.job.name)
        return record.status if record is not None and record.pid == slot.life.pid else ""

    # -- one step

    def of(self, roles: Sequence[str]) -> list[Slot]:
        """The jobs of these roles."""
        known = {role for group in STOP_ORDER for role in group}
        return [s for s in self.slots.values() if (s.job.role if s.job.role in known else "worker") in roles]

    def _are_past_starting(self, roles: Sequence[str]) -> bool:
        return all(slot.life.phase is not Phase.STARTING for slot in self.of(roles))

    def _are_over(self, roles: Sequence[str]) -> bool:
        return all(slot.life.phase is Phase.OVER for slot in self.of(roles))

    def step(self, slot: Slot, event: machine.Event) -> None:
        """Something happened to a job, or should."""
        loop = asyncio.get_running_loop()
        slot.life, effects = machine.step(slot.life, event, loop.time())
        if slot.timer is not None:
            slot.timer.cancel()
        deadline_s = machine.next_deadline_s(slot.life)
        slot.timer = loop.call_at(deadline_s, self.step, slot, machine.Tick()) if deadline_s is not None else None
        for effect in effects:
            self._perform(slot, effect)
        self._notes.stands(slot)
        if slot.life.phase is Phase.STARTING:
            self._poll_soon()
        self._changed.set()
        self._changed = asyncio.Event()

    def _perform(self, slot: Slot, effect: machine.Effect) -> None:
        match effect:
            case machine.Spawn():
                self._spawn(slot)
            case machine.Terminate():
                self._signal(slot, signal.SIGTERM)
                self._signal(slot, signal.SIGCONT)  # a stopped process hears SIGTERM only once it runs again
            case machine.Kill():
                if slot.process is not None:
                    slot.process.kill()
            case machine.Fell():
                self.witness.fell(slot, effect)
            case machine.Tell(text):
                self._tell(f"{slot.job.name} {text}")

    def _signal(self, slot: Slot, number: int) -> None:
        if slot.process is not None:
            slot.process.send(number)

    def _spawn(self, slot: Slot) -> None:
        job = slot.job
        try:
            set_aside(self._state_dir, job.name)  # "backing off", or a killed process's
            path = write_launch(self._state_dir, job.name, job.settings)
            process = self._processes.spawn(job.name, self._command(job, path))
        except OSError as error:
            why = f"could not be started: {error}"
            asyncio.get_running_loop().call_soon(self.step, slot, machine.Exited(why))
            return
        self._hold(slot, process)
        failures = slot.life.failures
        note = f"failed {failures} times in a row before" if failures >= machine.CRASH_LOOP_FAILURES else ""
        record = Record.of_process(process.pid, job.name, job.role, state="starting", note=note, failures=failures)
        self._notes.started(record)
        self.step(slot, machine.Spawned(process.pid))

    def _hold(self, slot: Slot, process: Process) -> None:
        slot.process = process
        slot.asked = Asked()
        process.on_exit(lambda status: self._gone(slot, process, status))

    def _gone(self, slot: Slot, process: Process, status: int | None) -> None:
        assert slot.process is process, "one process per job"
        slot.process = None
        set_aside(self._state_dir, slot.job.name, process.pid)
        last_line = self._processes.last_line(slot.job.name) if status else ""
        how = exit_words(status, last_line)
        self.step(slot, machine.Exited(how, refused=status == REFUSED))

    # -- readiness

    def _poll_soon(self) -> None:
        if self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(READY_POLL_S, self._poll)

    def _poll(self) -> None:
        self._polling = None
        for slot in self.slots.values():
            if slot.life.phase is not Phase.STARTING:
                continue
            record = read_record(self._state_dir, slot.job.name)
            if record is not None and record.pid == slot.life.pid and record.state == "ready":
                slot.record = record
                self.step(slot, machine.BecameReady())
                self.witness.back(slot)
            else:
                self._poll_soon()
