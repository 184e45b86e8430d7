"""Checks against real processes: no false alarm, and no true one on a single process, takes the last engine of a model
away from its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.health.expectations import ASKED_AT_ONCE
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, ask, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import DeploymentRig, get_json
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread

pytestmark = [pytest.mark.processes, pytest.mark.alone]

STREAMS = 8
BOUND_S = 120.0
BAD = 999  # a token in the prompt of a request that fails
# Control counts from a frontend's second report on, so that the first reset may not count.
RESETS = 4
BETWEEN_RESETS_S = 3.2  # failures of one kind within 2.5 s count as one (`control.reports.ONE_CAUSE_S`)


async def asked(rig: DeploymentRig, prompt: list[int], tokens: int) -> Received:
    body: dict[str, Any] = {"model": "holdfast-sim", "prompt": prompt, "max_tokens": tokens, "seed": 7}
    body |= {"temperature": 0.8, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return await ask(rig.port, "/v1/completions", body)


async def long_streams(rig: DeploymentRig, tokens: int) -> list[asyncio.Task[Received]]:
    """Return the streams once all of them make tokens."""
    before = await in_thread(made, rig)
    running = [asyncio.create_task(asked(rig, [100 + number, 40, 41, 42], tokens)) for number in range(STREAMS)]
    await until(rig, lambda: made(rig) > before + 4 * STREAMS, "every stream to make tokens")
    return running


def made(rig: DeploymentRig) -> int:
    return rig.tokens_total()


async def until(rig: DeploymentRig, true: Callable[[], Any], what: str) -> None:
    await in_thread(rig.wait_until, true, what, BOUND_S)


async def whole(running: list[asyncio.Task[Received]], tokens: int) -> list[Answer]:
    """Return the answers; each must have come to its end with all its tokens."""
    answers = [read_answer(received) for received in await asyncio.wait_for(asyncio.gather(*running), BOUND_S)]
    assert [(answer.error, answer.done, len(answer.tokens)) for answer in answers] == [(None, True, tokens)] * STREAMS
    return answers


def verdicts(rig: DeploymentRig) -> list[dict[str, Any]]:
    """Return what control's page says of each worker, [] while it does not answer."""
    name = next((name for name, record in rig.records().items() if record.get("role") == "control"), "control")
    status = rig.record(name).get("status", "")
    return get_json(status, "/health").get("verdicts", []) if status else []  # type: ignore[no-any-return]


def checked(rig: DeploymentRig, workers: int = 1) -> bool:
    found = [one for one in verdicts(rig) if one["status"] == "HEALTHY" and one["canary_passed_unix_s"]]
    return len(found) >= workers


def learnt(rig: DeploymentRig) -> int:
    """Return how many questions control has an answer for, or gave up; the first few are asked at once."""
    log = (rig.folder / "logs" / "control.log").read_text()
    return log.count("is pinned") + log.count("is not asked any more")


@pytest.mark.parametrize("failures", [3, pytest.param(1, marks=pytest.mark.long)])
async def test_connection_resets_lose_no_stream_of_a_lone_worker(failures: int) -> None:
    """With tokens between the resets the breaker stays shut; one that a single reset opens stops nothing."""
    health = {"breaker_failures": failures}
    with Deployment(1, {"ttft_ms": 5, "tpot_ms": 30}, control={"health": health}) as rig:
        await until(rig, lambda: checked(rig), "the worker to be checked")
        running = await long_streams(rig, 500)
        opened = asyncio.create_task(seen_open(rig)) if failures == 1 else None
        for _ in range(RESETS):
            await in_thread(rig.chaos, "worker-0", "reset")
            await asyncio.sleep(BETWEEN_RESETS_S)
        answers = await whole(running, 500)
        # On a busy machine a stream may be over before the last reset.
        assert all(answer.exact and RESETS - 1 <= answer.resumed <= RESETS for answer in answers), answers
        if opened is not None:
            last_resort = await asyncio.wait_for(opened, BOUND_S)
            assert (last_resort["status"], last_resort["last_resort"], last_resort["fall"]) == ("SUSPICIOUS", True, 0)
        await until(rig, lambda: checked(rig), "the worker to be sound again")


async def seen_open(rig: DeploymentRig) -> dict[str, Any]:
    """Return the worker's verdict when its breaker is not closed."""
    while True:
        found = [one for one in await in_thread(verdicts, rig) if one["breaker"] != "closed"]
        if found:
            return found[0]
        await asyncio.sleep(0.05)


async def asked_again(rig: DeploymentRig, prompt: list[int]) -> list[Answer]:
    """Ask as a client does that retries."""
    return [read_answer(await asked(rig, prompt, 20)) for _ in range(3)]


@pytest.mark.long
async def test_two_failing_requests_open_no_breaker_of_three_workers() -> None:
    """Clients ask them again and again, and each fails on every worker: the fault is the requests'."""
    with Deployment(3, {"ttft_ms": 5, "tpot_ms": 30}, control={}) as rig:
        await until(rig, lambda: checked(rig, 3), "the workers to be checked")
        for name in rig.worker_names:
            await in_thread(partial(rig.chaos, name, "error_token", token=BAD))
        running = await long_streams(rig, 400)
        bad = [asyncio.create_task(asked_again(rig, [BAD, 50 + number])) for number in range(2)]
        answers = await whole(running, 400)
        failed = await asyncio.wait_for(asyncio.gather(*bad), BOUND_S)
        assert all(answer.error for answers_of in failed for answer in answers_of)
        assert all(answer.resumed == 0 for answer in answers)
        assert {(one["status"], one["fall"]) for one in await in_thread(verdicts, rig)} == {("HEALTHY", 0)}


async def test_a_standby_takes_over_from_an_engine_that_fails_and_not_for_one_bad_request() -> None:
    """Streams beside a bad request go on where they are; when every new request fails, the engine hands over."""
    with Supervised("--vault-gib", "0.0625", "--sim-tpot-ms", "30") as up:
        await until(up, lambda: checked(up, 2), "the pair to be checked")
        active = await in_thread(up.active)
        await in_thread(partial(up.chaos, active.name, "error_token", token=BAD))
        running = await long_streams(up, 200)
        bad = asyncio.create_task(asked(up, [BAD, 50], 20))
        assert [(answer.exact, answer.resumed) for answer in await whole(running, 200)] == [(True, 0)] * STREAMS
        assert read_answer(await asyncio.wait_for(bad, BOUND_S)).error
        assert (await in_thread(up.active)).pid == active.pid

        # Now every new request fails there, after its first token.
        await in_thread(partial(up.chaos, active.name, "error_every", every=1))
        running = []
        for number in range(STREAMS):
            running.append(asyncio.create_task(asked(up, [100 + number, 40], 40)))
            await asyncio.sleep(0.2)
        answers = await whole(running, 40)
        assert all(answer.exact for answer in answers)
        assert any(answer.resumed for answer in answers)  # those that came after the handover met no failure
        assert (await in_thread(up.active)).pid != active.pid
        await in_thread(up.wait_restored, active.pid, BOUND_S)


async def test_a_process_that_answers_wrongly_is_replaced_and_the_service_goes_on() -> None:
    """Its weights are as they were written: its standby, which reads the same, is not convicted with it."""
    with Supervised("--vault-gib", "0.0625", "--sim-tpot-ms", "5", "--canary-interval-s", "1") as up:
        await until(up, lambda: checked(up, 2), "the pair to be checked")
        await until(up, lambda: learnt(up) >= ASKED_AT_ONCE, "what is expected to be learnt")
        first = await in_thread(up.active)
        # A late answer to a ping has the worker asked a known question at once.
        for fault, value in (("drift_logprobs", {"by": 1.0}), ("late_pongs", {"ms": 1500})):
            await in_thread(partial(up.chaos, first.name, fault, **value))
        answers: list[Answer] = []

        async def ask_on() -> None:
            while not answers or (await in_thread(up.engine, "active") or first).pid == first.pid:
                answers.append(read_answer(await asked(up, [40, 41, 42], 200)))

        await asyncio.wait_for(ask_on(), BOUND_S)
        await in_thread(up.wait_restored, first.pid, BOUND_S)
        assert [answer for answer in answers if answer.error or not answer.done] == []
        await until(up, lambda: checked(up, 2), "both engines to be sound")
        answer = read_answer(await asked(up, [40, 41, 42], 20))
        assert (answer.error, answer.exact) == (None, True)
        assert not any(one["quarantined"] for one in verdicts(up) if one["status"] != "DEAD")
