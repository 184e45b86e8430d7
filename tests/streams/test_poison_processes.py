"""Engines that are real processes and really die, of a request or of a signal, and the standbys that go on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from engine_child import POISON, next_token
from roster_rig import NAMESPACE, Reader, RosterRig, ScriptedWorker, roster_rig, until

from holdfast.core.errors import Code
from holdfast.core.requests import GenerateRequest, Sampling
from holdfast.streams.flight import Flight
from holdfast.streams.ledger import Ledger

TTFT_MS = 15
TOKENS = 60
KILLS = 5  # ten are in tests/decisions; each is a process
CHILD = Path(__file__).parent / "engine_child.py"


class Group:
    """One active engine and enough standbys; a dead active's place is taken at once."""

    def __init__(self, rig: RosterRig) -> None:
        self.rig = rig
        self.deaths = 0
        self.takeovers_s: list[float] = []
        self.active: asyncio.subprocess.Process
        self._children: list[asyncio.subprocess.Process] = []

    async def standby(self, number: int) -> asyncio.subprocess.Process:
        worker = ScriptedWorker(self.rig.folder, number)  # only described here; the child is it
        command = (sys.executable, str(CHILD), str(self.rig.folder), str(number), str(TTFT_MS))
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._children.append(child)
        assert child.stdout is not None
        await asyncio.wait_for(child.stdout.readline(), 60)  # an interpreter starts: on a swamped machine slowly
        self.rig.appear(worker)
        await until(lambda: self.rig.link(worker).workers is not None, "the standby to be connected")
        return child

    def promote(self, child: asyncio.subprocess.Process) -> None:
        self.active = child
        self.takeovers_s.append(asyncio.get_running_loop().time())
        assert child.stdin is not None
        child.stdin.write(f"{len(self.takeovers_s)}\n".encode())

    async def keep(self, standbys: list[asyncio.subprocess.Process]) -> None:
        for standby in standbys:
            await self.active.wait()
            self.deaths += 1
            self.promote(standby)
        await self.active.wait()

    async def stop(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


@contextlib.asynccontextmanager
async def group(rig: RosterRig, engines: int) -> AsyncIterator[Group]:
    made = Group(rig)
    try:
        first, *standbys = await asyncio.gather(*(made.standby(number) for number in range(1, engines + 1)))
        made.promote(first)
        keeping = asyncio.get_running_loop().create_task(made.keep(standbys))
        yield made
        assert not keeping.done(), "one more engine died than may"
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await made.stop()


def ask(rig: RosterRig, name: str, prompt: list[int]) -> tuple[Flight, Reader]:
    workers = rig.directory.set_for(NAMESPACE, ScriptedWorker(rig.folder, 1).card)
    reader = Reader()
    flight = Flight(Ledger(GenerateRequest(name, list(prompt), len(prompt), Sampling(TOKENS, 7))), workers, reader)
    rig.dispatcher.launch(flight)
    return flight, reader


def unbroken(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def test_one_request_kills_three_engines_and_no_other_stream(tmp_path: Path) -> None:
    """32 streams share two deaths with it; they all finish with the tokens of an unbroken run, it is failed by name."""
    async with roster_rig(tmp_path) as rig, group(rig, engines=4) as engines:
        prompts = {f"s{number}": [number + 1, 2, 3] for number in range(32)}
        asked = {name: ask(rig, name, prompt) for name, prompt in prompts.items()}
        _, poisoned = ask(rig, "poison", [1, POISON, 3])
        await until(lambda: poisoned.failure, "the poison to be found")
        await until(lambda: all(reader.finish for _, reader in asked.values()), "the others to finish")
        assert poisoned.failure is not None
        assert poisoned.failure[0] is Code.POISONED
        assert {name: reader.shown for name, (_, reader) in asked.items()} == {
            name: unbroken(prompt) for name, prompt in prompts.items()
        }
        assert engines.deaths == 3
        assert rig.dispatcher.stats.lost == {Code.POISONED: 1}


async def test_new_engines_killed_at_once_cost_no_stream(tmp_path: Path) -> None:
    """Each is killed as soon as it says that it leads: the streams wait for one that lives, and go on exactly."""
    async with roster_rig(tmp_path) as rig, group(rig, engines=KILLS + 1) as engines:
        prompts = {f"s{number}": [number + 1, 2, 3] for number in range(8)}
        asked = {name: ask(rig, name, prompt) for name, prompt in prompts.items()}
        for kill in range(KILLS):
            await until(lambda: rig.dispatcher.stats.takeovers == kill + 1, "an engine to lead")  # noqa: B023
            engines.active.kill()
            await until(lambda: engines.deaths == kill + 1, "the death to be known")  # noqa: B023
        await until(lambda: all(reader.finish or reader.failure for _, reader in asked.values()), "all to end")
        assert not rig.dispatcher.stats.lost
        assert {name: reader.shown for name, (_, reader) in asked.items()} == {
            name: unbroken(prompt) for name, prompt in prompts.items()
        }


async def test_kills_with_tokens_in_between_cost_no_stream(tmp_path: Path) -> None:
    """The active is killed by signal again and again, each time after every stream made a token: nobody is suspect."""
    async with roster_rig(tmp_path) as rig, group(rig, engines=5) as engines:
        prompts = {f"s{number}": [number + 1, 2, 3] for number in range(8)}
        asked = {name: ask(rig, name, prompt) for name, prompt in prompts.items()}
        for kill in range(4):
            before = {name: len(reader.shown) for name, (_, reader) in asked.items()}
            await until(lambda: all(len(r.shown) > before[n] for n, (_, r) in asked.items()), "a token each")  # noqa: B023
            engines.active.kill()
            await until(lambda: engines.deaths == kill + 1, "the death to be known")  # noqa: B023
            assert all(flight.ledger.deaths == 0 for flight, _ in asked.values())
        await until(lambda: all(reader.finish for _, reader in asked.values()), "all to finish")
        assert {name: reader.shown for name, (_, reader) in asked.items()} == {
            name: unbroken(prompt) for name, prompt in prompts.items()
        }
        assert not rig.dispatcher.stats.lost
