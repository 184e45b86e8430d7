"""A worker as a person starts it, and what its probes say: real processes, real HTTP, real signals.

What they say in each state is in test_failover_order.py.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.memory.writer_lock import WriterLock
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.engines import FailoverSettings
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.plan import plan
from holdfast.spec.settings import filled
from holdfast.store.opening import open_store
from holdfast.wire.net import SocketNetwork
from tests.rigs.failover_worker import Stage, WorkerProcess, stored_keys

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(300)]

QUICKLY_S = 30.0  # shorter than anything that a worker could wait for, and a busy machine's pauses are shorter still


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


def stored(stage: Stage) -> list[str]:
    """Every key in the store now."""

    async def look() -> list[str]:
        store = open_store(stage.store, SocketNetwork(), random.Random(1))
        await store.start()
        try:
            return await stored_keys(store)
        finally:
            await store.close()

    return asyncio.run(look())


def left_behind(stage: Stage) -> list[str]:
    """What a worker that ended left in the run directory; the store's socket and journals are not its own, and the file
    in which its name was claimed stays."""
    found = [str(path.relative_to(stage.folder / "run")) for path in (stage.folder / "run").rglob("*")]
    return [name for name in sorted(found) if not name.startswith(("store", "journals", "w.claim"))]


def assert_leaves(stage: Stage, worker: WorkerProcess, within_s: float = QUICKLY_S) -> None:
    status, took_s = worker.terminate()
    assert status == 0, worker.log()
    assert took_s < within_s
    assert stored(stage) == []
    assert left_behind(stage) == []


def waking_to_load(stage: Stage, *options: str) -> tuple[WorkerProcess, WriterLock]:
    """A leader whose vault lost the weights while nobody had them mapped, held at the writer lock it must have."""
    stage.start_vault()
    holder = stage.hold_lock()
    worker = stage.worker("--standby", "unmapped", *options)
    worker.until_state("standby")
    stage.stop_vault()
    worker.until(lambda: worker.get("/health")[0] == 503, "it to see that the vault is gone")
    stage.start_vault()
    worker.until(lambda: worker.get("/health")[0] == 200, "it to have found the new one")
    writing = WriterLock(stage.folder, "somebody who loads")
    assert writing.try_acquire()
    holder.kill()
    worker.until(lambda: "loaded again" in worker.get("/live")[1].get("reason", ""), "it to say what it does")
    return worker, writing


def test_a_wake_that_has_to_load_is_alive_beyond_its_deadline(stage: Stage) -> None:
    """The vault lost the weights while nobody had them mapped: the wake loads them, says so, and is alive long past the
    time of a wake, for as long as a load may take. Then it leads."""
    worker, writing = waking_to_load(stage, "--wake-s", "1")
    began_s = time.monotonic()
    while time.monotonic() - began_s < 1.5:
        status, body = worker.get("/live")
        assert (status, body["state"]) == (200, "waking"), body
    writing.release()
    worker.until_state("active")


def test_asked_to_stop_while_a_wake_loads(stage: Stage) -> None:
    """It leaves at once: nobody waits for a load whose engine is not wanted any more."""
    worker, writing = waking_to_load(stage)
    status, took_s = worker.terminate()
    assert (status, took_s < QUICKLY_S) == (0, True), worker.log()
    writing.release()


def test_a_wake_needs_time() -> None:
    """`holdfast up --wake-s` reaches every engine, and none at all is refused by its flag."""
    options = DeploymentSpec("local", worker=WorkerLaunch(failover=FailoverSettings(wake_s=7.5)))
    engines = [launch for launch in plan(Path("/tmp/hf"), options) if isinstance(launch, WorkerLaunch)]
    assert [engine.failover.wake_s for engine in engines] == [7.5, 7.5]
    with pytest.raises(UserError, match="--wake-s must be over 0, got 0"):
        filled(options, {("worker", "failover", "wake_s"): 0.0})


# -- leaving early


def test_asked_to_stop_while_standing_by(stage: Stage) -> None:
    """It leaves at once with status 0, nothing of it is left, and it never led."""
    stage.start_vault()
    stage.hold_lock()
    worker = stage.worker("--standby", "unmapped")
    worker.until_state("standby")
    worker.until(lambda: len(stored(stage)) == 2, "its keys")
    assert_leaves(stage, worker)
    assert "waking" not in worker.log()


def test_a_frozen_store_does_not_keep_a_leader(stage: Stage) -> None:
    """Nobody takes its keys away, and it leaves within its bound: as long as the store is waited for once."""
    stage.start_vault()
    worker = stage.worker("--drain-s", "60")
    worker.until_state("active")
    worker.until(lambda: len(stored(stage)) == 2, "its keys")
    stage.deployment.signal("store", signal.SIGSTOP)
    try:
        status, took_s = worker.terminate()
    finally:
        stage.deployment.signal("store", signal.SIGCONT)
    assert (status, left_behind(stage)) == (0, [])
    assert took_s < QUICKLY_S


# -- the environment


def test_a_normal_worker_goes_straight_to_active(stage: Stage) -> None:
    """Without a lock there is nothing to wait for and no lever: it serves, registered once, and drains as before."""
    worker = stage.worker(failover=False)
    facts = worker.until_state("active")
    assert (facts["status"], facts["group"], worker.probes()) == ("ready", "", (200, 200))
    assert (facts["role"], facts["model"]) == ("worker", "holdfast-sim")
    assert (facts["ready"], facts["reason"]) == (True, "serving")
    assert worker.get("/live")[1]["status"] == "live"
    worker.until(lambda: [key.split("/")[1] for key in stored(stage)] == ["instances", "mdc"], "its keys")
    for lever in ("sleep", "wake_up"):
        status, body = worker.get(f"/engine/{lever}", "POST")
        assert status == 404
        assert f"/engine/{lever}" in body["error"]["message"]
    log = worker.log()
    assert log.count("init -> active") == 1
    assert "standby" not in log
    assert_leaves(stage, worker)


def test_probes_while_loading_may_say_ready(stage: Stage) -> None:
    """DYN_SYSTEM_STARTING_HEALTH_STATUS=ready: yes, yes in Init. The engine's number comes from ENGINE_ID. Asked to
    stop while it loads, it leaves at once with status 0, and nothing of it is left."""
    worker = stage.worker(DYN_SYSTEM_STARTING_HEALTH_STATUS="ready", ENGINE_ID="3")
    facts = worker.until_state("init")
    assert worker.probes() == (200, 200)
    assert facts["engine_id"] == 3
    assert_leaves(stage, worker)


def test_no_status_page(stage: Stage) -> None:
    """Switched off (DYN_SYSTEM_PORT=-1 does the same): the worker serves, and nobody listens."""
    worker = stage.worker(failover=False, DYN_SYSTEM_ENABLED="false")
    worker.until(lambda: len(stored(stage)) == 2, "its keys")
    worker.until(lambda: worker.record().get("state") == "ready", "its record")
    assert worker.record()["status"] == ""
    assert worker.get("/live") == (0, {}), "nobody answers"
