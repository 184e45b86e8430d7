"""The fault matrix: 64 open streams, two workers, one of them hit in mid-stream, and what the clients saw.

Each case runs in a deployment of its own: first unbroken, then broken, with the same requests and seeds. And no false
alarm: engines slowed 20 times on a machine whose cores are all taken, and nothing is moved. And outages with no worker
to take over at once: the only worker dies, the store dies or freezes, the frontend dies.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import Any

import uvloop

from holdfast.core.tasks import beside
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, ask, chat_body, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.waiting import in_thread
from holdfast.testing.workload import Outcome, Workload, compare, hit_in_the_middle, run_streams

BUSY, SLOW_FACTOR = 16, 20.0  # processes that take all cores, and how much slower engines are

HITS: dict[str, Callable[[Deployment, str], Any]] = {
    "kill": lambda deployment, name: deployment.kill(name),
    "stop": lambda deployment, name: deployment.signal(name, signal.SIGSTOP),
    "wedge": lambda deployment, name: deployment.chaos(name, "wedge"),
    "reset": lambda deployment, name: deployment.chaos(name, "reset"),
    "terminate": lambda deployment, name: deployment.signal(name, signal.SIGTERM),
    "error": lambda deployment, name: deployment.chaos(name, "error_after", tokens=3),
    "cut": lambda deployment, name: deployment.chaos(name, "cut"),
}
# Worst stall each fault may cause, in milliseconds.
STALL_MS_MAX = {"kill": 150, "stop": 2000, "wedge": 2000, "reset": 150, "terminate": 150, "error": 150, "cut": 150}

ORPHANS_S = 30.0  # they would run for forty


def run_case(fault: str, load: Workload | None = None) -> Outcome:
    """Return one row of the matrix."""
    load = load or Workload()
    with Deployment(workers=2) as deployment:
        unbroken = uvloop.run(run_streams(deployment.port, load))
        broken = uvloop.run(hit_in_the_middle(deployment, load, lambda: HITS[fault](deployment, "worker-0")))
        return compare(fault, unbroken, broken)


def run_stop_and_continue(load: Workload, continue_after_s: float) -> tuple[Outcome, list[str]]:
    """Send SIGSTOP, and SIGCONT while the moved streams still run: no client may get what the worker then sends.

    Also tells the verdicts the frontend went through until it trusts the worker again."""

    def hit() -> None:
        deployment.signal("worker-0", signal.SIGSTOP)
        time.sleep(continue_after_s)
        deployment.signal("worker-0", signal.SIGCONT)

    with Deployment(workers=2) as deployment:
        unbroken = uvloop.run(run_streams(deployment.port, load))
        broken = uvloop.run(hit_in_the_middle(deployment, load, hit))
        deployment.wait_until(lambda: len(deployment.alive_workers()) == 2, "the worker to be trusted again")
        log = deployment.log("frontend").splitlines()
    verdicts = [line.split(" -> ")[1].split(":")[0] for line in log if " -> " in line]
    return compare("stop", unbroken, broken), verdicts[2:]


def _spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def run_calm(seconds: float, streams: int) -> dict[str, Any]:
    """Streams are open all the time, on slow engines and cores that are taken."""
    lost, seed = 0, 0
    with Deployment(workers=2) as deployment:
        until_s = time.monotonic() + seconds
        spinners = [multiprocessing.Process(target=_spin, args=(until_s,), daemon=True) for _ in range(BUSY)]
        for spinner in spinners:
            spinner.start()
        for name in deployment.worker_names:
            deployment.chaos(name, "slow", factor=SLOW_FACTOR)
        while time.monotonic() < until_s:
            seed += 1
            # 20 ms x 20 = 0.4 s a token: 40 tokens is 16 s and more on taken cores.
            answers = uvloop.run(run_streams(deployment.port, Workload(streams, 40, seed)))
            lost += sum(not answer.done for answer in answers)
        for spinner in spinners:
            spinner.join(30)
        deployment.wait_until(lambda: bool(deployment.health()), "the frontend to answer")
        resumed = deployment.health()["resumed_total"]
    told = {"seconds": seconds, "busy_processes": BUSY, "slow_factor": SLOW_FACTOR}
    return told | {"streams_lost": lost, "resumed": resumed}


# -- no worker to take over at once


def only_worker_returns(restart_after_s: float, load: Workload) -> dict[str, Any]:
    """One worker, killed in mid-stream; a new one comes up later; all streams finish, exact."""

    def hit(deployment: Deployment) -> None:
        deployment.kill("worker-0")
        time.sleep(restart_after_s)
        deployment.start_worker("worker-0")

    with Deployment(workers=1) as deployment:
        unbroken = uvloop.run(run_streams(deployment.port, load))
        broken = uvloop.run(hit_in_the_middle(deployment, load, lambda: hit(deployment)))
    outcome = compare("only worker", unbroken, broken)
    waited = sum(answer.waiting for answer in broken)
    return outcome.as_dict() | {"restart_after_s": restart_after_s, "waiting_comments": waited}


async def _open_and_new(deployment: Deployment, load: Workload) -> tuple[list[Answer], Received, float]:
    """Open streams when the only worker dies for good, and a request that comes after."""
    broken = hit_in_the_middle(deployment, load, lambda: deployment.kill("worker-0"))
    async with beside(broken, "open streams") as answers:
        worker = deployment.processes["worker-0"]
        await in_thread(deployment.wait_until, lambda: worker.poll() is not None, "the worker to be killed", 60.0)
        began_s = time.monotonic()
        late = await ask(deployment.port, "/v1/chat/completions", chat_body("late", 5))
        waited_s = time.monotonic() - began_s
        return await answers, late, waited_s


def no_worker_within_hold(hold_s: float, load: Workload) -> dict[str, Any]:
    """Start no second worker: new requests get 503 with Retry-After, open streams an error event and no [DONE]."""
    with Deployment(workers=1, frontend={"holds": {"hold_s": hold_s}}) as deployment:
        answers, late, waited_s = uvloop.run(_open_and_new(deployment, load))
        alive = deployment.processes["frontend"].poll() is None
    return {
        "hold_s": hold_s,
        "streams": len(answers),
        "ended_with_error_event": sum(answer.error is not None for answer in answers),
        "false_done": sum(answer.done for answer in answers),
        "error": answers[0].error,
        "late_status": late.status,
        "late_retry_after": "retry-after:" in late.head().lower(),
        "late_waited_s": round(waited_s, 2),
        "late_body": json.loads(late.body()),
        "frontend_alive": alive,
    }


def _freeze(deployment: Deployment, seconds: float) -> None:
    deployment.signal("store", signal.SIGSTOP)
    time.sleep(seconds)
    deployment.signal("store", signal.SIGCONT)


def _kill(deployment: Deployment, seconds: float) -> None:
    deployment.kill("store")
    time.sleep(seconds)
    deployment.start_store()


def store_outage(kind: str, how: str, seconds: float, streams: int = 16) -> dict[str, Any]:
    """The store away for a while under continuous load; then a new worker must be found, so watches resumed."""
    strike: Callable[[Deployment, float], None] = {"kill": _kill, "freeze": _freeze}[how]
    with Deployment(workers=2, store=kind) as deployment:
        counts = uvloop.run(_load_through(deployment, streams, lambda: strike(deployment, seconds)))
        after = len(deployment.alive_workers())
        deployment.start_worker("worker-2")
        deployment.wait_until(lambda: len(deployment.alive_workers()) == 3, "a new worker to be found", 30.0)
        deployment.signal("worker-2", signal.SIGTERM)
        deployment.wait_until(lambda: len(deployment.health().get("workers", [])) == 2, "the new worker to leave", 30.0)
        resumed = deployment.health()["resumed_total"]
    return {"store": kind, "how": how, "seconds": seconds, **counts, "workers_after": after, "resumed": resumed}


async def _load_through(deployment: Deployment, streams: int, strike: Callable[[], None]) -> dict[str, int]:
    """Streams one after another, on several connections, until the strike is over and a little longer."""
    counts = {"finished": 0, "broken": 0}

    async def one(number: int, over: asyncio.Future[Any]) -> None:
        rounds_after = 2
        while rounds_after:
            rounds_after -= over.done()
            received = await ask(deployment.port, "/v1/chat/completions", chat_body(f"outage {number}", 50))
            fine = received.status == 200 and read_answer(received).done
            counts["finished" if fine else "broken"] += 1

    async with beside(in_thread(strike), "the strike") as over:
        await asyncio.gather(*(one(number, over) for number in range(streams)))
        await over
    return counts


def frontend_killed(streams: int = 32) -> dict[str, Any]:
    """The frontend is killed under load: its orphaned work is cancelled on the engines at once."""
    with Deployment(workers=2) as deployment:

        async def load() -> float:
            async with beside(run_streams(deployment.port, Workload(streams, 2000)), "orphans") as running:
                busy = lambda: _streams(deployment) == streams  # noqa: E731
                await in_thread(deployment.wait_until, busy, "streams to be open")
                await in_thread(deployment.kill, "frontend")
                idle = lambda: _streams(deployment) == 0  # noqa: E731
                took_s = float(await in_thread(deployment.wait_until, idle, "orphans to be cancelled", ORPHANS_S))
                await running
                return took_s

        cancelled_s = uvloop.run(load())
        deployment.start_frontend()
        back_s = deployment.wait_until(lambda: deployment.health().get("status") == "ready", "the frontend to be back")
    return {
        "streams": streams,
        "orphans_cancelled_ms": round(cancelled_s * 1000),
        "restart_to_ready_s": round(back_s, 2),
    }


def _streams(deployment: Deployment) -> int:
    return sum(int(deployment.worker_facts(name)["streams"]) for name in deployment.worker_names)
