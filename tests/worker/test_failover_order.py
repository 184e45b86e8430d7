"""The order of a failover worker's whole life, with a real store, vault, lock, engine and connections.

Inside, everything that the main loop calls is listened to and goes on as before; outside, a store's watch, data
connections and HTTP see what was really told. The worker is held at each point by what it waits for: a vault that is
not there, a lock that another process has, a vault that is frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from holdfast.core.errors import Code
from holdfast.discovery.keys import CARDS, INSTANCES, LOADINGS, STANDBYS
from holdfast.engines.sim.hosted import VaultSim
from holdfast.failover.file_lock import FileLock
from holdfast.failover.journal import read_terms
from holdfast.failover.lifecycle import State
from holdfast.roles.engines import make_engine
from holdfast.spec.engines import FailoverSettings, SimSettings
from holdfast.spec.launch import WorkerLaunch
from holdfast.store.contract import Deleted, Put, Snapshot
from holdfast.store.opening import open_store
from holdfast.wire.messages import Active, Draining, Refused, Welcome
from holdfast.wire.net import real_world
from holdfast.worker.beat import BeatThread
from holdfast.worker.failover_worker import FailoverWorker
from holdfast.worker.process import Worker
from tests.rigs.failover_worker import BOUND_S, DataPeer, Stage, ask, connect, stored_keys, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SIM = SimSettings(ttft_ms=5.0, tpot_ms=2.0, vault_gib=0.004, kv_blocks=2048)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


class Rig:
    """One failover worker in this process, and the story of what it did."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.story: list[tuple[str, int, bool | None]] = []  # what, terms in the journal, what a Hello is answered
        self.told: list[str] = []  # what the store told another client, in order
        self.stop = asyncio.Event()
        self.data = str(stage.folder / "run" / "w.sock")
        self.engine: VaultSim
        self.worker: Worker
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        stage, world = self.stage, real_world(random.Random(1))
        launch = WorkerLaunch(
            state_dir=str(stage.folder),
            name="w",
            deployment="test",
            sim=SIM,
            failover=FailoverSettings(vault_socket=stage.socket),
            lock=str(stage.lock),
            group="pair",
            address=f"unix://{self.data}",
            beat_address=f"unix://{stage.folder}/run/w.beat",
        )
        made = make_engine(launch, world.rng)
        assert isinstance(made.engine, VaultSim)
        self.engine = made.engine
        self._store, self._watcher = (open_store(stage.store, world.network, world.rng) for _ in range(2))
        for store in (self._store, self._watcher):
            await store.start()
        parts = {"store": self._store, "world": world, "make_beats": BeatThread}
        self.worker = Worker(self.engine, made.card, made.tokenizer, launch, **parts)
        self.lock = FileLock(stage.lock, "w", world.clock)
        self._listen()
        failover = FailoverWorker(self.worker, self.engine, self.lock, stage.journals)
        self.ready = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(failover.run(self.stop, lambda where: self.ready.set())),
        ]

    @property
    def running(self) -> asyncio.Task[None]:
        return self._tasks[1]

    async def close(self) -> None:
        self.stop.set()
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(self.running, return_exceptions=True)
        self._tasks[0].cancel()
        for store in (self._store, self._watcher):
            await store.close()

    # -- inside

    def _listen(self) -> None:
        """Everything calls on as it did, and is noted before and after."""
        worker, engine = self.worker, self.engine
        for name in ("load", "check", "wake", "become_standby"):
            self._hear(engine, name, partial(_name, name))
        self._hear(engine, "prove", lambda _: "prove")
        self._hear(self.lock, "acquire", lambda _: "lock")
        self._hear(self.lock, "release", lambda _: "release")
        self._hear(worker, "introduce", lambda _: "introduce")
        self._hear(worker, "step", lambda given: type(given[0]).__name__)
        self._hear(worker, "hand_back", lambda _: "hand back")
        self._hear(worker.sessions, "announce", lambda _: "announce")
        self._hear(self._store, "register", lambda given: given[0].rpartition(worker.key.namespace)[0])

    def _hear(self, thing: Any, method: str, words: Callable[[tuple[Any, ...]], str]) -> None:
        inner = getattr(thing, method)

        async def waited(*given: Any, **named: Any) -> Any:
            self._note(f"{words(given)} …")
            result = await inner(*given, **named)
            self._note(words(given))
            return result

        def at_once(*given: Any, **named: Any) -> Any:
            self._note(words(given))
            return inner(*given, **named)

        setattr(thing, method, waited if inspect.iscoroutinefunction(inner) else at_once)

    def _note(self, what: str) -> None:
        if what:
            welcome = self.worker.welcome
            active = None if welcome is None else welcome.active
            self.story.append((what, len(read_terms(self.stage.journals)), active))

    # -- outside

    async def _watch(self) -> None:
        async for event in self._watcher.watch("v1/"):
            match event:
                case Snapshot(items):
                    self.told += [f"+ {key}" for key in items]
                case Put(key, _):
                    self.told.append(f"+ {key}")
                case Deleted(key):
                    self.told.append(f"- {key}")

    def key(self, prefix: str) -> str:
        return f"{prefix}{self.worker.key.path}"

    @property
    def status(self) -> int:
        """Return the page's port."""
        return int(str(self.worker.where["status"]).rpartition(":")[2])

    async def probes(self) -> tuple[int, int, dict[str, Any]]:
        live, _ = await asyncio.to_thread(ask, self.status, "/live")
        health, facts = await asyncio.to_thread(ask, self.status, "/health")
        return live, health, facts

    async def assert_nobody_was_told(self, peer: DataPeer, stream: int) -> None:
        """It is known as a standby, and as nothing else: to the store, on an open connection, on a new one."""
        peer.generate(stream)
        await until(lambda: list(peer.outputs(stream)), "an answer to a request")
        [output] = peer.outputs(stream)
        assert output.failure is not None
        assert output.failure.code == Code.ENGINE_SHUTDOWN
        assert not any(isinstance(message, Active) for message in peer.heard)
        another = await connect(self.data)
        [welcome] = another.heard
        assert isinstance(welcome, Welcome)
        assert (welcome.active, welcome.epoch, welcome.group) == (False, 0, "pair")
        another.close()
        assert await stored_keys(self._watcher) == [self.key(CARDS), self.key(STANDBYS)]
        assert read_terms(self.stage.journals) == []


def _name(name: str, _: tuple[Any, ...]) -> str:
    return name


@contextlib.asynccontextmanager
async def started(stage: Stage) -> AsyncIterator[Rig]:
    rig = Rig(stage)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.close()


UP_TO_THE_LOCK = [
    (LOADINGS, 0, None),
    ("load …", 0, None),
    ("check …", 0, None),
    ("check", 0, None),
    ("load", 0, None),
    ("check …", 0, None),
    ("check", 0, None),
    ("introduce", 0, None),
    ("Loaded", 0, False),
    (CARDS, 0, False),
    (STANDBYS, 0, False),
    ("lock …", 0, False),
]
WON = [
    ("lock", 0, False),
    ("LockWon", 0, False),
    ("wake …", 0, False),
]
WOKEN = [
    ("wake", 0, False),
    ("prove", 0, False),
    ("introduce", 1, False),
    ("announce", 1, True),
    ("Announced", 1, True),
    (INSTANCES, 1, True),
]
STEPS_BACK = [
    ("StandDown", 1, True),
    ("hand back", 1, True),
    ("introduce", 1, True),
    ("become_standby …", 1, False),
    ("become_standby", 1, False),
    ("release …", 1, False),
    ("release", 1, False),
    ("Ended", 1, False),
]


async def test_the_whole_life_in_order(stage: Stage) -> None:
    """Vault, load, canary, standby's key, lock, fence and adoption, journal, Active on the open connection, instance's
    key: in this order, and at each point before the end nobody was told more than was so."""
    holder = stage.hold_lock()
    async with started(stage) as rig:
        await until(lambda: rig.story == UP_TO_THE_LOCK[:2], "the load to begin")
        early = await connect(rig.data)
        assert [message.code for message in early.heard if isinstance(message, Refused)] == [Code.CANNOT_CONNECT]
        assert (await rig.probes())[:2] == (503, 503)
        assert (await asyncio.to_thread(ask, rig.status, "/engine/sleep", "POST"))[0] == 409
        await until(lambda: rig.told == [rig.key("+ " + LOADINGS)], "one key, of an engine that is loading")

        stage.start_vault()
        await until(lambda: rig.story == UP_TO_THE_LOCK, f"the lock to be waited for, not {rig.story}")
        await until(lambda: rig.key("+ " + STANDBYS) in rig.told, "the standby's key")
        await until(lambda: rig.key("- " + LOADINGS) in rig.told, "the key of an engine that is loading to go")
        rig.told = [told for told in rig.told if LOADINGS not in told]
        peer = await connect(rig.data)
        await rig.assert_nobody_was_told(peer, 1)
        assert (await rig.probes())[:2] == (200, 200)

        stage.vault(signal.SIGSTOP)
        holder.kill()
        await until(lambda: rig.story == UP_TO_THE_LOCK + WON, f"the wake to begin, not {rig.story}")
        await rig.assert_nobody_was_told(peer, 2)
        live, health, facts = await rig.probes()
        assert (live, health, facts["state"]) == (200, 200, "waking")

        stage.vault(signal.SIGCONT)
        await until(lambda: rig.key("- " + STANDBYS) in rig.told, "the standby's key to go")
        assert rig.story == UP_TO_THE_LOCK + WON + WOKEN
        keys = [rig.key("+ " + CARDS), rig.key("+ " + STANDBYS), rig.key("+ " + INSTANCES), rig.key("- " + STANDBYS)]
        assert rig.told == keys
        [term] = read_terms(stage.journals)
        assert [message for message in peer.heard if isinstance(message, Active)] == [Active(term.epoch)]
        live, health, facts = await rig.probes()
        assert (live, health, facts["state"], facts["epoch"]) == (200, 200, "active", term.epoch)
        marks = [facts["failover"][f"{step}_ms"] for step in ("lock", "fence", "adopted", "announced")]
        assert marks == sorted(marks)

        peer.generate(3)
        await until(lambda: any(output.finish for output in peer.outputs(3)), "an answer")
        stage.vault(signal.SIGSTOP)  # it tells the vault that it steps back, and waits for the answer
        rig.stop.set()
        await until(lambda: rig.worker.life.state is State.DRAINING, "it to drain")
        live, health, facts = await rig.probes()
        assert (live, health, facts["reason"]) == (200, 503, "draining: asked to stop")
        stage.vault(signal.SIGCONT)
        await asyncio.wait_for(rig.running, BOUND_S)
        assert rig.story == UP_TO_THE_LOCK + WON + WOKEN + STEPS_BACK
        assert isinstance(peer.heard[-1], Draining)
        await until(lambda: len(rig.told) == len(keys) + 2, "its keys to go")
        assert sorted(rig.told[len(keys) :]) == [rig.key("- " + INSTANCES), rig.key("- " + CARDS)]


async def test_a_standby_is_ready_again_only_once_it_has_verified(stage: Stage) -> None:
    """The vault dies under a standby and comes back: it says 503 and why until it has read its memory again, and it
    was alive all the while."""
    stage.start_vault()
    stage.hold_lock()
    async with started(stage) as rig:
        await asyncio.wait_for(rig.ready.wait(), BOUND_S)
        gate, verify = threading.Event(), rig.engine.hosted.weights.verify
        begun = threading.Event()

        def held(mapped: Any) -> str:
            begun.set()
            assert gate.wait(BOUND_S)
            return verify(mapped)

        rig.engine.hosted.weights.verify = held  # type: ignore[method-assign]
        stage.vault(signal.SIGKILL)
        try:
            await until(begun.is_set, "the memory to be verified")
            assert rig.engine.memory.client.connected
            live, health, facts = await rig.probes()
            assert (live, health, facts["state"], facts["ready"]) == (200, 503, "standby", False)
            assert "cannot vouch for its memory: the vault is gone" in facts["reason"]
        finally:
            gate.set()
        await until(lambda: not rig.worker.life.memory_problem, "its word for the memory")
        assert (await rig.probes())[:2] == (200, 200)
