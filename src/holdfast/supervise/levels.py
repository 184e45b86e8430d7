"""Replicas on a node that go to host memory and come back: their vaults asked, their engines told, one move at a time.

Theory. To host memory: every engine lets go, then every vault moves. Back: every vault moves, then every engine is
woken. Each step that was done already is done again for nothing, so a move may be begun anew at any point, by anybody.
An engine that starts meanwhile maps the weights and is told in the next round, or waits for them where they are away.

Always true: at most one move of a replica is under way here; one that came to nothing has a reason, by its order's id;
a vault that does not answer is nobody's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.core.tasks import Tasks
from holdfast.fleet.actions import Action
from holdfast.fleet.desired import Level
from holdfast.memory.client.calls import VaultRefused, demote, promote, vault_status
from holdfast.spec.jobs import Job
from holdfast.spec.launch import VaultLaunch
from holdfast.supervise.backend import Kept
from holdfast.supervise.machine import Phase
from holdfast.supervise.records import read_record
from holdfast.supervise.status_client import post_action

ANSWER_S = 2.0  # for a vault to say where its weights are: it serves while it copies, and one that is stopped is killed
COMMAND_S = 60.0  # an engine's own bound for a command
# Within this all engines must have let go; one that has just started may take that long to load. The controller gives
# a whole move twice as much.
LET_GO_S = 60.0
AGAIN_S = 0.2  # between two rounds
LOST = "its weights were in host memory, and were lost with its vault"
THERE = {Level.WARM: "warm", Level.HOT: "hot"}  # a vault's refusal to move what is there already


def vaults_of(jobs: Iterable[Job]) -> list[VaultLaunch]:
    """Those of them that may have weights in host memory."""
    found = [msgspec.json.decode(job.settings, type=VaultLaunch) for job in jobs if job.role == "vault"]
    return [vault for vault in found if vault.host_budget_bytes]


class Levels:
    """Where each replica of a node is, and its moves. `news` is called when a move is over."""

    def __init__(
        self, state_dir: Path, network: Network, kept: Callable[[], Mapping[str, Kept]], news: Callable[[], None]
    ) -> None:
        self._state_dir = state_dir
        self._network = network
        self._kept = kept
        self._news = news
        self._moves = Tasks("moves of replicas")
        self._moving: set[str] = set()  # replicas' names
        self._again: dict[str, tuple[str, float]] = {}  # of each the last order that is over, and when it may be anew
        self.wrong: dict[str, tuple[str, str]] = {}  # of each the last order that came to nothing, and why
        self.in_host: dict[str, bool | None] = {}  # by name; None: its vaults do not say, or differ
        self.lost: set[str] = set()

    async def stop(self) -> None:
        await self._moves.stop()

    async def look(self) -> None:
        """Ask the vaults of all that are here."""
        asked = {name: vaults for name in self._kept() if (vaults := self._vaults(name))}
        said = await asyncio.gather(*(self._phases(vaults) for vaults in asked.values()))
        phases = dict(zip(asked, said, strict=True))
        self.in_host = {name: _in_host(each) for name, each in phases.items()}
        self.lost = {name for name, each in phases.items() if "LOST" in each}
        self.wrong = {name: wrong for name, wrong in self.wrong.items() if name in asked}
        self._again = {name: again for name, again in self._again.items() if name in asked}

    async def _phases(self, vaults: Iterable[VaultLaunch]) -> list[str]:
        return list(await asyncio.gather(*(_phase(vault) for vault in vaults)))

    def _vaults(self, name: str) -> list[VaultLaunch]:
        one = self._kept().get(name)
        return vaults_of(job for job, _ in one.processes.values()) if one is not None else []

    def move(self, action: Action, to: Level) -> None:
        """Begin it, unless one is under way, or it was over a moment ago: what came of it is seen a little later."""
        over, again_s = self._again.get(action.name, ("", 0.0))
        rests = over == action.id and asyncio.get_running_loop().time() < again_s
        if action.name not in self._moving and not rests:
            self._moving.add(action.name)
            self._moves.spawn(self._move(action, to), f"{action.verb} {action.name}")

    async def _move(self, action: Action, to: Level) -> None:
        name = action.name
        try:
            await (self._to_host(name) if to is Level.WARM else self._to_device(name))
        except (VaultRefused, OSError, ValueError) as error:
            self.wrong[name] = (action.id, str(error) or type(error).__name__)
        finally:
            self._moving.discard(name)
            self._again[name] = action.id, asyncio.get_running_loop().time() + AGAIN_S
            self._news()

    # -- there

    async def _to_host(self, name: str) -> None:
        """VaultRefused, OSError, ValueError say why not."""
        vaults = self._vaults(name)
        if not vaults:
            raise ValueError("its vaults were given no host memory, or it has none")
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LET_GO_S
        while True:
            why = await self._tell_all(name, "let_go")
            try:
                for vault in vaults:
                    await _there(vault, Level.WARM)
                return
            except VaultRefused as refused:
                if refused.code not in ("mapped", "busy", "empty") or loop.time() >= until_s:
                    raise VaultRefused(refused.code, f"{refused}{': ' + why if why else ''}") from refused
            await asyncio.sleep(AGAIN_S)

    # -- and back

    async def _to_device(self, name: str) -> None:
        vaults = self._vaults(name)
        back: list[VaultLaunch] = []
        try:
            for vault in vaults:
                await _there(vault, Level.HOT)
                back.append(vault)
        except (VaultRefused, OSError):
            for vault in back:  # of several all are moved, or none
                await _there(vault, Level.WARM)
            raise
        await self._tell_all(name, "wake_up")

    async def _tell_all(self, replica: str, command: str) -> str:
        """Each engine that is ready: why one of them would not."""
        one = self._kept().get(replica)
        processes = one.processes if one is not None else {}
        ready = [name for name, (job, life) in processes.items() if job.role == "worker" and life.phase is Phase.READY]
        told = await asyncio.gather(*(self._tell(name, command) for name in ready))
        return next((f"{name}: {why}" for name, why in zip(ready, told, strict=True) if why), "")

    async def _tell(self, name: str, command: str) -> str:
        record = await asyncio.to_thread(read_record, self._state_dir, name)
        if record is None or not record.status:
            return "it shows no status page"
        status, said = await post_action(parse_address(record.status), self._network, COMMAND_S, f"/engine/{command}")
        return "" if status == 200 else said or "it does not answer"


def _in_host(phases: Iterable[str]) -> bool | None:
    each = set(phases)
    if each == {"WARM"}:
        return True
    return False if each <= {"EMPTY", "RW", "COMMITTED", "RO"} else None


async def _phase(vault: VaultLaunch) -> str:
    try:
        return (await vault_status(vault.socket_path, ANSWER_S)).weights
    except (OSError, VaultRefused):
        return ""


async def _there(vault: VaultLaunch, to: Level) -> None:
    """Have a vault's weights where they are to be; they may be there already."""
    try:
        await (demote if to is Level.WARM else promote)(vault.socket_path)
    except VaultRefused as refused:
        if refused.code != THERE[to]:
            raise
