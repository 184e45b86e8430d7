"""A frontend inside the test's own process, with a meter on its loop: how much CPU each turn of it takes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import uvloop

from holdfast.frontend.process import run_frontend
from holdfast.spec.launch import FrontendLaunch
from holdfast.store.opening import open_store
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from holdfast.wire.net import real_world

WAIT_S = 60.0


class MeteredFrontend:
    """One more frontend of a deployment, on a loop in a thread of its own."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._last_s = 0.0
        self.port = free_port()
        self.turns = 0
        self.worst_s = 0.0  # CPU time of the loop's own thread in one turn: what else runs on the machine is not in it

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        world = real_world()
        store = open_store(self._deployment.store, world.network, world.rng)
        await store.start()
        settings = FrontendLaunch(deployment="bench", address=f"tcp://127.0.0.1:{self.port}")
        await run_frontend(settings, store, world, self._stop, lambda facts: self._ready.set())
        await store.close()

    def _turn(self) -> None:
        assert self._loop is not None
        now_s = time.thread_time()
        self.worst_s = max(self.worst_s, now_s - self._last_s)
        self._last_s = now_s
        self.turns += 1
        self._loop.call_soon(self._turn)

    @contextlib.contextmanager
    def running(self) -> Iterator[MeteredFrontend]:
        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert self._ready.wait(WAIT_S)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._turn)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(WAIT_S)

    def forget(self) -> None:
        """The worst turn is of what comes from now on."""
        self.worst_s = 0.0
