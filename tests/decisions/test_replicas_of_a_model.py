"""Replicas share their model's requests without what went wrong elsewhere (facts 20), with a real frontend and workers:
a dead one that wins every pull, one that takes its request with it, a slow one that all wait for, a new one that gets
nothing, and one request at a time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.testing.clients import Stream, chat_body
from holdfast.testing.deployment import Deployment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

QUICK = {"ttft_ms": 1, "tpot_ms": 1}
# However long a machine takes to start a worker, and far shorter than a test may take.
PATIENT: dict[str, Any] = {"holds": {"hold_s": 100.0, "queue_s": 100.0, "provision_s": 100.0}}


@pytest.fixture(scope="module")
def place() -> Iterator[Deployment]:
    """A frontend; each test brings workers for a model of its own."""
    with Deployment(workers=0, frontend=PATIENT) as started:
        yield started


def serve(place: Deployment, model: str, name: str, **sim: Any) -> None:
    """Bring one more replica, and wait until the frontend knows it."""
    before = len(place.alive_workers())
    place.start_worker(name, model=model, sim={**QUICK, **sim})
    place.wait_until(lambda: len(place.alive_workers()) == before + 1, f"{name} to serve")


def ask(place: Deployment, model: str, number: int = 0, tokens: int = 10) -> Stream:
    return Stream(place.port, chat_body(f"story {number}", tokens, model=model, seed=number, return_token_ids=True))


@pytest.fixture(autouse=True)
def nobody_is_left(place: Deployment) -> Iterator[None]:
    """Of one test's workers in the next."""
    yield
    for name in [name for name in place.processes if name not in ("store", "frontend")]:
        place.kill(name)
        del place.processes[name]
    place.wait_until(lambda: not place.alive_workers(), "nobody to be left")


def made(place: Deployment, name: str) -> int:
    return int(place.worker_facts(name)["tokens_total"])


def test_a_dead_replica_wins_no_pull(place: Deployment) -> None:
    """One that fails every request at once, and so is free first, and one that was killed: everybody is answered."""
    serve(place, "dead", "sound")
    serve(place, "dead", "broken")
    place.chaos("broken", "zero_tokens")
    answers = [ask(place, "dead", number).answer() for number in range(20)]
    assert [answer.wrong for answer in answers] == [""] * len(answers)
    place.kill("broken")
    answers = [ask(place, "dead", number).answer() for number in range(20)]
    assert [answer.wrong for answer in answers] == [""] * len(answers)


def test_removing_a_replica_mid_request_strands_nothing(place: Deployment) -> None:
    """Its streams go on at another, with the tokens that they would have had."""
    serve(place, "leaves", "goes", tpot_ms=10)
    serve(place, "leaves", "stays", tpot_ms=10)
    unbroken = [one.answer().tokens for one in [ask(place, "leaves", number, 100) for number in range(4)]]
    for name in ("goes", "stays"):  # so that they run still when it leaves
        place.chaos(name, "slow", factor=10)
    running = [ask(place, "leaves", number, 100) for number in range(4)]
    for one in running:
        one.wait_tokens(3)
    place.signal("goes", signal.SIGTERM)
    place.chaos("stays", "clear")
    answers = [one.answer() for one in running]
    assert [answer.wrong for answer in answers] == [""] * len(answers)
    assert [answer.tokens for answer in answers] == unbroken
    assert any(answer.resumed for answer in answers)


def test_the_slowest_replica_does_not_delay_the_first_answer(place: Deployment) -> None:
    """The first that is ready serves, while another does not come up at all."""
    place.start_worker("stuck", model="slow", sim=QUICK)
    place.signal("stuck", signal.SIGSTOP)
    serve(place, "slow", "ready")
    assert not ask(place, "slow").answer().wrong
    place.signal("stuck", signal.SIGCONT)
    place.wait_until(lambda: len(place.alive_workers()) == 2, "the slow one to come after all")


def test_scaled_up_replicas_get_traffic(place: Deployment) -> None:
    """One that comes is given what waits for the full one, and nobody has to tell the frontend."""
    serve(place, "more", "full", concurrency=2, queue=0, tpot_ms=50)
    running = [ask(place, "more", number, 2000).wait_tokens() for number in range(2)]
    waiting = [ask(place, "more", number, 4) for number in range(2, 6)]
    serve(place, "more", "new", concurrency=2, queue=0, tpot_ms=50)
    assert not any(one.answer().wrong for one in waiting)
    assert made(place, "new") >= 4 * 4
    assert not any(one.so_far().done for one in running), "nobody had to end for them"


def test_a_replica_has_many_requests_at_a_time(place: Deployment) -> None:
    """All are under way before the first has ended."""
    serve(place, "many", "one", tpot_ms=20)
    running = [ask(place, "many", number, 2000) for number in range(8)]
    for one in running:
        one.wait_tokens(2)
    assert not any(one.so_far().done for one in running)
