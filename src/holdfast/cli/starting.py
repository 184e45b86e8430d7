"""What a deployment that starts is doing at this moment, from its processes' records and logs.

Always true: what a process logged before this start says nothing about it; reading never waits for a process, so a
person sees the phases of one that is stuck, too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.launch import Launch, WorkerLaunch
from holdfast.cli.serving import waits_for
from holdfast.core.ports import Network
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import read_record
from holdfast.wire.net import SocketNetwork

LOOK_S = 0.2  # between two looks; a person sees it move
LOG_BYTES_MAX = 65_536  # of a log's end; a start logs a few kilobytes
STARTING = "starting"
IMPORTING = "loading torch"
WAITING = "waiting for the weights"
LOADING = "loading the weights"
WARMING = "warming up"
FALLEN = ("backing off", "crash loop", "refused", "unkillable")  # as the supervisor writes them
WORKS = {
    "fetch": "fetching the model",
    "check": "checking the model",
    "unpack": "unpacking the model",
    "hash": "reading the model",
    "load": LOADING,
    "compile": "compiling kernels",
}

_WORK = re.compile(r" INFO (\w+): (\d+ of \d+ MiB|…)$")
_PHASES = (
    (re.compile(r" INFO writing the weights "), LOADING),
    (re.compile(r" INFO weights .* bytes (written|mapped and verified) in "), WARMING),
)

Doing = Mapping[str, str]


def phase_of(lines: Sequence[str], first: str) -> str:
    """What an engine that logged these lines is at. Pure."""
    for line in reversed(lines):
        if found := _WORK.search(line):
            work = WORKS.get(found[1], found[1])
            return work if found[2] == "…" else f"{work}, {found[2]}"
        for pattern, phase in _PHASES:
            if pattern.search(line):
                return phase
    return first


@dataclass(frozen=True, slots=True)
class Start:
    """One start: who should run, and how long their logs were before."""

    state_dir: Path
    launches: Sequence[Launch]
    marks: Mapping[str, int]

    @classmethod
    def of(cls, state_dir: Path, logs: LocalProcesses, launches: Sequence[Launch]) -> Start:
        """To be made before anything is started."""
        return cls(state_dir, launches, {launch.name: log_size(logs.path(launch.name)) for launch in launches})

    def doing(self, logs: LocalProcesses) -> Doing:
        """Name and phase of everyone who is not ready."""
        late = [launch for launch in self.launches if not self._is_ready(launch)]
        phases = {launch.name: self._phase(launch, logs) for launch in late}
        further = {launch.group for launch in _workers(self.launches) if phases.get(launch.name) != IMPORTING}
        for launch in _workers(late):
            if phases[launch.name] == IMPORTING and launch.group in further:
                phases[launch.name] = WAITING  # of the engines of one vault one writes the weights
        return phases

    def _is_ready(self, launch: Launch) -> bool:
        record = read_record(self.state_dir, launch.name)
        return record is not None and record.state == "ready"

    def _phase(self, launch: Launch, logs: LocalProcesses) -> str:
        record = read_record(self.state_dir, launch.name)
        if record is not None and record.state in FALLEN:
            return f"{record.state}: {record.note}"
        if not isinstance(launch, WorkerLaunch):
            return STARTING
        lines = log_since(logs.path(launch.name), self.marks[launch.name])
        return phase_of(lines, IMPORTING if launch.engine == "torch" else STARTING)


async def unfinished(start: Start, logs: LocalProcesses, network: Network) -> Doing:
    """Who is not ready, and what they do; once all are, who does not serve yet, and why. Empty: everything is up."""
    return start.doing(logs) or await waits_for(start.state_dir, start.launches, network)


async def follow(start: Start, logs: LocalProcesses, show: Callable[[Doing], None]) -> None:
    """Show it until cancelled."""
    network = SocketNetwork()
    while True:
        show(await unfinished(start, logs, network))
        await asyncio.sleep(LOOK_S)


def in_words(doing: Doing) -> str:
    return "; ".join(f"{name} is {phase}" for name, phase in doing.items())


def _workers(launches: Sequence[Launch]) -> list[WorkerLaunch]:
    return [launch for launch in launches if isinstance(launch, WorkerLaunch)]


def log_size(path: Path) -> int:
    """Bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_since(path: Path, mark: int) -> list[str]:
    """The lines that came after it was `mark` bytes long, or the last of them."""
    size = log_size(path)
    if size < mark:  # it was set aside, and begun anew
        mark = 0
    try:
        with path.open("rb") as log:
            log.seek(max(mark, size - LOG_BYTES_MAX))
            return log.read(LOG_BYTES_MAX).decode(errors="replace").splitlines()
    except OSError:
        return []
