"""One more node of a fleet that others started: replicas as its controller asks for them, and nothing else.

Always true: who finds the processes of an earlier supervisor goes on with them, and tells the fleet of them at once,
whether or not all of them are ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from holdfast.core.tasks import beside
from holdfast.roles.hosted import NodeSite
from holdfast.roles.running import Shown, Tell, begin
from holdfast.spec.jobs import Job
from holdfast.supervise.loop import Supervisor


@dataclass(frozen=True, slots=True)
class Joined:
    """A node, for as long as it is kept."""

    kind: ClassVar[str] = "joined"

    node: NodeSite

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.node)

    @classmethod
    def decoded(cls, data: bytes) -> Joined:
        return cls(msgspec.json.decode(data, type=NodeSite))

    @property
    def state_dir(self) -> Path:
        return Path(self.node.state_dir)

    def jobs(self) -> list[Job]:
        return self.node.jobs()

    async def run(self, supervisor: Supervisor, *, tied: bool, shown: Shown, tell: Tell) -> None:
        await begin(supervisor, tied=tied)
        supervisor.start_late()
        async with beside(self.node.host(supervisor, tell), "replicas") as hosting:
            await shown("")  # who shows it waits until the fleet knows of it
            await hosting
