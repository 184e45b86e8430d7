"""A real frontend against a worker that breaks the rules: it lives, its clients get an answer, nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from holdfast.core.requests import Failure, GenerateRequest, Output, TokenLogprobs
from holdfast.engines.contract import Capabilities, EngineEvents, Limits, Progress
from holdfast.roles.engines import make_engine
from holdfast.spec.launch import WorkerLaunch
from holdfast.store.opening import open_store
from holdfast.testing.clients import Received, ask, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.wire.frames import encode, frame
from holdfast.wire.messages import Closed, Draining, Step
from holdfast.wire.net import real_world
from holdfast.worker.beat import BeatThread
from holdfast.worker.process import Worker

NAN = float("nan")


class BadEngine:
    """Says what the test tells it to say, once; without orders it answers two tokens and an end."""

    limits = Limits(64, 64, 32_768)
    capabilities = Capabilities(deterministic=True)

    def __init__(self) -> None:
        self.script: list[Output] = []
        self.raw = b""  # written to every frontend instead of outputs
        self.write_raw: Any = None
        self._steps = 0
        self.running: set[int] = set()

    async def load(self, events: EngineEvents) -> None:
        self._events = events

    async def stop(self) -> None: ...

    def submit(self, stream: int, request: GenerateRequest) -> None:
        self.running.add(stream)
        asyncio.get_running_loop().call_soon(self._say, stream)

    def cancel(self, stream: int) -> None:
        self.running.discard(stream)

    def ping(self, answer: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(answer)

    def progress(self) -> Progress:
        return Progress(self._steps, len(self.running), 0, 1.0, 50.0, None)

    def _say(self, stream: int) -> None:
        script, self.script = self.script or [Output(0, [300]), Output(0, [301], "stop")], []
        raw, self.raw = self.raw, b""
        if raw:
            self.write_raw(raw)
            return
        loop = asyncio.get_running_loop()
        for place, output in enumerate(script):
            output.stream = stream
            loop.call_later(0.05 * place, self._events.outputs, [output])  # apart, so that each is a packet of its own
        self._steps += len(script)
        self.running.discard(stream)


class Rig:
    def __init__(self, deployment: Deployment, worker: Worker, engine: BadEngine) -> None:
        self.deployment, self.worker, self.engine = deployment, worker, engine

    async def ask(self, **more: Any) -> Received:
        body = {"model": "holdfast-sim", "prompt": "x", "max_tokens": 50, "return_token_ids": True, **more}
        async with asyncio.timeout(60):
            return await ask(self.deployment.port, "/v1/completions", body)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A store and a frontend as processes, the worker in this one: real sockets, a rogue engine."""
    with Deployment(workers=0, frontend={"holds": {"hold_s": 60.0}}) as deployment:
        run = deployment.folder / "run"
        launch = WorkerLaunch(
            deployment="bench",
            address=f"unix://{run}/bad.sock",
            beat_address=f"unix://{run}/bad.beat",
            status_address=f"unix://{run}/bad.status",
        )
        world, engine = real_world(random.Random(1)), BadEngine()
        made = make_engine(launch, world.rng)
        store = open_store(deployment.store, world.network, world.rng)
        await store.start()
        worker = Worker(engine, made.card, made.tokenizer, launch, store=store, world=world, make_beats=BeatThread)
        engine.write_raw = lambda data: [session.transport.write(data) for session in worker.sessions.open]
        stop, ready = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(worker.run(stop, lambda facts: ready.set()))
        async with asyncio.timeout(60):
            await ready.wait()
        await asyncio.to_thread(deployment.wait_until, lambda: bool(deployment.alive_workers()), "the worker to be met")
        yield Rig(deployment, worker, engine)
        assert deployment.processes["frontend"].poll() is None
        facts = await asyncio.to_thread(deployment.health)
        log = deployment.log("frontend")
        stop.set()
        await running
        await store.close()
    assert facts["streams"] == 0
    assert "Traceback" not in log, log


async def test_odd_outputs_reach_the_client_as_well_as_they_can(rig: Rig) -> None:
    """Ids outside the vocabulary, no tokens at all, logprobs that are missing, too few or not finite."""
    for output in (
        Output(0, [10**12, -5, 300], "stop"),
        Output(0, [], "length"),
        Output(0, [300, 301], "stop", [TokenLogprobs(NAN, [(10**12, NAN), (-1, float("-inf"))])]),
        Output(0, [300], "stop", []),
        Output(0, [300], "no such reason"),
    ):
        for stream in (True, False):
            rig.engine.script = [output]
            received = await rig.ask(stream=stream, logprobs=2)
            assert received.status == 200, (output, received)
            if stream:
                assert read_answer(received).done


async def test_every_failure_becomes_an_answer(rig: Rig) -> None:
    """With a status while none has gone out, as an error event once a stream has begun; never as a false end."""
    for failure, status in (
        (Failure("Cancelled", "changed my mind"), 499),
        (Failure("InvalidRequest", "not this one"), 400),
        (Failure("ResourceExhausted", "never fits"), 429),
    ):
        rig.engine.script = [Output(0, [], failure=failure)]
        received = await rig.ask()
        assert received.status == status, failure
        assert b'"error"' in received.body(), failure
        rig.engine.script = [Output(0, [300]), Output(0, [], failure=failure)]
        answer = read_answer(await rig.ask(stream=True))
        assert answer.error is not None, failure
        assert not answer.done, failure


async def test_an_unknown_failure_is_resumed(rig: Rig) -> None:
    """A code that only a newer worker knows fails the attempt and not the answer."""
    for failure in (Failure("NoSuchCode", "x"), Failure("", "")):
        rig.engine.script = [Output(0, [], failure=failure)]
        assert (await rig.ask()).status == 200, failure
        rig.engine.script = [Output(0, [300]), Output(0, [], failure=failure)]
        answer = read_answer(await rig.ask(stream=True))
        assert answer.done, failure
        assert answer.resumed == 1, failure


async def test_outputs_after_the_end_and_for_nobody_are_dropped(rig: Rig) -> None:
    """A stream ends once, and numbers nobody knows harm nobody."""
    rig.engine.raw = encode(
        Step([Output(10**9, [5]), Output(-1, [], "stop"), Output(2**63, [], failure=Failure("", ""))])
    )
    rig.engine.raw += encode(Closed([1000, -1, 2**63]))
    asking = asyncio.create_task(rig.ask(stream=True))
    await asyncio.to_thread(rig.deployment.wait_until, lambda: bool(rig.engine.running), "the stream to come")
    (stream,) = rig.engine.running
    rig.worker.sessions.outputs([Output(stream, [300]), Output(stream, [301], "stop"), Output(stream, [302], "stop")])
    answer = read_answer(await asking)
    assert (answer.tokens, answer.finish, answer.done) == ([300, 301], "stop", True)


async def test_a_worker_that_loses_its_tongue_is_left_and_met_again(rig: Rig) -> None:
    """The connection breaks, the stream waits and goes on when the worker is met anew."""
    for raw in (
        b"HTTP/1.1 200 OK\r\n\r\n",
        frame(b"\x91" * 100_000),
        frame(b""),
        b"\xff\xff\xff\xff",
        encode(Draining("no")) + b"\xff\xff\xff\xff",
    ):
        rig.engine.raw = raw
        answer = read_answer(await rig.ask(stream=True))
        assert (answer.tokens, answer.done, answer.resumed) == ([300, 301], True, 1), raw[:20]
