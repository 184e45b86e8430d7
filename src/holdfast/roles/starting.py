"""What a deployment that starts is doing at this moment, from its processes' records and logs; and whether it serves,
by its frontends' own word.

Always true: what a process logged before this start says nothing about it; reading never waits for a process, so a
person sees the phases of one that is stuck, too. That every process is ready is not enough: who has nobody to send a
request to does not serve, and neither does a frontend that does not answer in time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.spec.jobs import AT_LEISURE
from holdfast.spec.launch import FrontendLaunch, Launch, WorkerLaunch, role_of
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import read_record
from holdfast.supervise.status_client import get_facts
from holdfast.wire.net import SocketNetwork

ANSWER_S = 1.0  # a live frontend answers in milliseconds; past it, it does not serve
LOOK_S = 0.2  # between two looks; a person sees it move
LOG_BYTES_MAX = 65_536  # of a log's end; a start logs a few kilobytes
STARTING = "starting"
IMPORTING = "loading torch"
IMPORTS = {"torch": IMPORTING, "vllm": "loading vLLM"}  # seconds, before an engine says anything
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
        """Name and phase of everyone who is not ready, of those whom serving needs."""
        needed = [launch for launch in self.launches if role_of(launch) not in AT_LEISURE]
        late = [launch for launch in needed if not self._is_ready(launch)]
        phases = {launch.name: self._phase(launch, logs) for launch in late}
        importing = set(IMPORTS.values())
        further = {launch.group for launch in _workers(self.launches) if phases.get(launch.name) not in importing}
        for launch in _workers(late):
            if phases[launch.name] in importing and launch.group in further:
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
        return phase_of(lines, IMPORTS.get(launch.engine, STARTING))


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


# -- whether it serves


async def waits_for(state_dir: Path, launches: Sequence[Launch], network: Network) -> dict[str, str]:
    """Frontend and what it waits for, for each that does not serve every model; empty: all do."""
    frontends = [launch for launch in launches if isinstance(launch, FrontendLaunch)]
    models = sorted({launch.model for launch in launches if isinstance(launch, WorkerLaunch)})
    facts = await asyncio.gather(*(_facts(state_dir, launch.name, network) for launch in frontends))
    said = {launch.name: lacks(found, models, launch.store) for launch, found in zip(frontends, facts, strict=True)}
    return {name: lack for name, lack in said.items() if lack}


async def _facts(state_dir: Path, name: str, network: Network) -> dict[str, Any] | None:
    record = read_record(state_dir, name)
    return await get_facts(parse_address(record.status), network, ANSWER_S) if record and record.status else None


def lacks(facts: dict[str, Any] | None, models: Sequence[str], store: str) -> str:
    """What a frontend that answered so waits for; "" if it serves all of `models`. Pure."""
    if facts is None:
        return "waiting for its answer"
    missing = [model for model in models if model not in facts.get("models", ())]
    if not missing and (facts.get("status") == "ready" or not models):
        return ""
    if facts.get("store") == "lost":
        return f"waiting for the store {store}: it does not answer"
    objections = {str(worker["reason"]) for worker in facts.get("workers", ()) if worker.get("reason")}
    whom = f"waiting for a worker of {', '.join(missing)}" if missing else "waiting for a worker"
    why = "; ".join(sorted(objections)) or str(facts.get("reason") or "")
    return f"{whom}: {why}" if why else whom
