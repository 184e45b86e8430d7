"""Two worker sets of one model side by side, with real workers: a stream stays with its set while that lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.testing.answers import Answer
from holdfast.testing.clients import ask, chat_body, read_answer
from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.raw_http import Raw, Reply
from tests.rigs.mid_stream import slow_down

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# Another context length is another card, so another checksum: a set of its own.
OTHER = {"context_tokens_max": 16_384}


async def _chat(deployment: Deployment, number: int, tokens: int, **more: Any) -> Answer:
    return read_answer(await ask(deployment.port, "/v1/chat/completions", chat_body(f"set {number}", tokens, **more)))


async def _two_sets(deployment: Deployment) -> None:
    deployment.start_worker("worker-other", sim=OTHER)
    both = lambda: len(deployment.alive_workers()) == 2  # noqa: E731
    await asyncio.to_thread(deployment.wait_until, both, "both sets to serve")


async def test_requests_go_to_both_sets() -> None:
    """New requests choose among the model's sets by weight; the model is listed once and never goes off the air."""
    with Deployment(workers=1) as deployment:
        await _two_sets(deployment)
        answers = await asyncio.gather(*(_chat(deployment, number, 5) for number in range(40)))
        assert all(answer.done and answer.exact for answer in answers)
        made = [deployment.worker_facts(name)["requests_total"] for name in ("worker-0", "worker-other")]
        assert min(made) >= 5, made
        assert deployment.health()["models"] == ["holdfast-sim"]


@pytest.mark.long
async def test_a_set_that_is_gone_is_replaced_and_the_answer_says_so() -> None:
    """Its only worker dead for good, a stream is held, then goes on in the other set, flagged inexact, nothing lost."""
    with Deployment(workers=1, frontend={"holds": {"stand_in_after_s": 1.0}}) as deployment:
        streaming = [
            asyncio.ensure_future(_chat(deployment, number, 150, return_token_ids=True)) for number in range(4)
        ]
        busy = lambda: deployment.worker_facts("worker-0")["tokens_total"] > 40  # noqa: E731
        await asyncio.to_thread(deployment.wait_until, busy, "the streams to be under way")
        slow_down(deployment)  # they are under way still when the other set is up, however long that takes
        deployment.start_worker("worker-other", sim=OTHER)
        await asyncio.to_thread(
            deployment.wait_until, lambda: len(deployment.alive_workers()) == 2, "the other set to serve"
        )
        assert deployment.worker_facts("worker-0")["streams"] == 4, "a stream left its living set"
        await asyncio.to_thread(deployment.kill, "worker-0")
        answers = await asyncio.gather(*streaming)
    assert [len(answer.tokens) for answer in answers] == [150] * 4
    assert all(answer.done and answer.resumed == 1 and answer.exact is False for answer in answers)


def test_a_model_that_lost_its_last_worker_is_unavailable_not_unknown() -> None:
    """503 with Retry-After for as long as it is known, also for one that is only desired; 404 for a name nobody had;
    and it is served again as soon as a worker is back."""
    with Deployment(workers=1, frontend={"holds": {"hold_s": 0.5}, "known": {"models": ("wanted",)}}) as deployment:
        deployment.start_worker("worker-other", model="other")
        deployment.wait_until(lambda: "other" in deployment.health()["models"], "the other model")
        deployment.kill("worker-other")
        deployment.wait_until(lambda: "other" not in deployment.health()["models"], "it to be gone")
        for model in ("other", "wanted"):
            asked = _ask(deployment, model)
            assert (asked.status, asked.error["code"], asked.error["type"]) == (
                503, "NoWorker", "service_unavailable_error",
            )  # fmt: skip
            assert int(asked.headers["retry-after"]) >= 1
            with Raw(deployment.port) as raw:
                card = raw.get(f"/v1/models/{model}").reply()
            assert (card.status, int(card.headers["retry-after"]) >= 1) == (503, True)
        assert _ask(deployment, "never-heard-of").status == 404
        deployment.start_worker("worker-other", model="other")
        deployment.wait_until(lambda: "other" in deployment.health()["models"], "the other model again")
        assert _ask(deployment, "other").status == 200


def _ask(deployment: Deployment, model: str) -> Reply:
    with Raw(deployment.port) as raw:
        return raw.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 2}).reply()
