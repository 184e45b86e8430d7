"""A deployment whose processes stay the same, as `holdfast up` asks for it by options: brought up until it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from holdfast.core.errors import Refused, UserError
from holdfast.roles.hosted import NodeSite
from holdfast.roles.running import Shown, Tell, begin, log_dir
from holdfast.roles.starting import Start, in_words, unfinished
from holdfast.spec.jobs import AT_LEISURE, Job
from holdfast.spec.launch import decode_launches, encode_launches
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.slots import Slot
from holdfast.wire.net import SocketNetwork

# Then those are started too whom serving does not need: a large model takes minutes, and what loads may be watched.
LATE_S = 10.0
LOOK_S = 0.05  # between two looks at whether it serves: a person does not see that


@dataclass(frozen=True, slots=True)
class Planned:
    """One start of fixed launches, which may take so long until it serves."""

    kind: ClassVar[str] = "planned"

    start: Start
    wait_s: float
    node: NodeSite | None = None  # of a fleet, which this machine is as well

    def encoded(self) -> bytes:
        launches = encode_launches(list(self.start.launches))
        return msgspec.json.encode((str(self.state_dir), self.wait_s, launches, self.node))

    @classmethod
    def decoded(cls, data: bytes) -> Planned:
        state_dir, wait_s, launches, node = msgspec.json.decode(data, type=tuple[str, float, bytes, NodeSite | None])
        logs = LocalProcesses(log_dir(Path(state_dir)))
        return cls(Start.of(Path(state_dir), logs, decode_launches(launches)), wait_s, node)

    @property
    def state_dir(self) -> Path:
        return self.start.state_dir

    def jobs(self) -> list[Job]:
        kept = self.node.jobs() if self.node is not None else []
        return [*(Job.of(launch) for launch in self.start.launches), *kept]

    async def run(self, supervisor: Supervisor, *, tied: bool, shown: Shown, tell: Tell) -> None:
        lack = await _start(supervisor, self.start, tied, self.wait_s)
        if lack and not supervisor.adopted:
            raise Refused(lack) if is_refused(supervisor) else UserError(lack)
        await shown(lack)
        if self.node is not None:
            await self.node.host(supervisor, tell)
        await asyncio.Event().wait()  # unbounded on purpose: it is kept as long as nobody ends it


async def _start(supervisor: Supervisor, start: Start, tied: bool, wait_s: float) -> str:
    """Bring everything up until it serves; why that cannot be, or is not so within `wait_s`, or ""."""
    logs, network = LocalProcesses(log_dir(start.state_dir)), SocketNetwork()
    try:
        async with asyncio.timeout(wait_s):
            await begin(supervisor, tied=tied)
            await supervisor.wait(lambda: supervisor.all_ready() or bool(hopeless(needed(supervisor))), LATE_S)
            supervisor.start_late()
            await supervisor.wait(lambda: supervisor.all_ready() or bool(hopeless(needed(supervisor))))
            while True:
                lack = hopeless(needed(supervisor))
                if lack or not await unfinished(start, logs, network):
                    return lack
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return f"not serving after {wait_s:g} s: {in_words(await unfinished(start, logs, network))}"


def needed(supervisor: Supervisor) -> list[Slot]:
    """Those without whom nobody is served: a control that cannot start is shown by `ps`, and stops nothing."""
    return [slot for slot in supervisor.slots.values() if slot.job.role not in AT_LEISURE]


def hopeless(slots: Iterable[Slot]) -> str:
    """Why one of them will never serve; "": each may yet."""
    for slot in slots:
        if slot.life.is_hopeless:
            note = slot.life.note
            why = note if slot.life.phase is Phase.REFUSED else note.partition(", ")[2]
            return f"{slot.job.name} cannot be started: {why}"
    return ""


def is_refused(supervisor: Supervisor) -> bool:
    """Whether a second try would end the same."""
    return any(slot.life.phase is Phase.REFUSED for slot in needed(supervisor))
