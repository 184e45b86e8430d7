"""One client's large body costs that client time, and nobody else: no turn of the loop reads it, copies a prompt for
each choice, or sends all of them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import pytest

from holdfast.frontend import app, large_bodies
from holdfast.frontend.admission import LAUNCH_TOKENS_MAX
from holdfast.frontend.api.errors import ApiError
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import Flight
from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.loop_meter import WAIT_S, MeteredFrontend
from tests.rigs.frontend.raw_http import Raw, ask, completion, padded

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGE = 15_000_000


@pytest.fixture(scope="module")
def frontend(deployment: Deployment) -> Iterator[MeteredFrontend]:
    with pytest.MonkeyPatch.context() as patch, MeteredFrontend(deployment).running() as made:
        patch.setattr(large_bodies, "PARSE_S", WAIT_S)  # no machine is too busy here
        deadline_s = time.monotonic() + WAIT_S
        while ask(made.port, COMPLETIONS, completion("hi", max_tokens=1)).status != 200:
            assert time.monotonic() < deadline_s
        yield made


def cpu_s_of_reading(body: bytes) -> float:
    began_s = time.thread_time()
    msgspec.json.decode(body)
    return time.thread_time() - began_s


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"model":"holdfast-sim","messages":[' + b"{}," * (LARGE // 3) + b"{}]}"),
        (COMPLETIONS, b'{"model":"holdfast-sim","prompt":[' + b"5001," * (LARGE // 5) + b"1]}"),
    ],
    ids=["objects", "ids"],
)
def test_no_turn_of_the_loop_reads_a_large_body(frontend: MeteredFrontend, path: str, body: bytes) -> None:
    """Its worst turn takes a fraction of what reading the body takes, in the same run, on the same machine."""
    frontend.forget()
    reply = ask(frontend.port, path, body)
    assert reply.status == 400
    assert reply.error["param"] in ("messages", "prompt")
    reading_s = cpu_s_of_reading(body)
    print(f"reading takes {reading_s * 1e3:.1f} ms, the loop's worst turn was {frontend.worst_s * 1e3:.1f} ms")
    assert frontend.worst_s < max(reading_s / 2, 0.020)


def test_no_turn_of_the_loop_sends_all_choices(frontend: MeteredFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices of a prompt of 30,000 tokens go out over many turns, a bounded number of tokens in each."""
    sent: Counter[int] = Counter()
    launch = Dispatcher.launch

    def counted(self: Dispatcher, flight: Flight) -> None:
        sent[frontend.turns] += flight.ledger.length
        launch(self, flight)

    monkeypatch.setattr(Dispatcher, "launch", counted)
    reply = ask(frontend.port, COMPLETIONS, completion([7] * 30_000, n=128, max_tokens=1))
    assert reply.status == 200
    assert len(reply.json()["choices"]) == 128
    assert sum(sent.values()) == 128 * 30_000
    assert max(sent.values()) <= LAUNCH_TOKENS_MAX + 30_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion("hello", seed=1, max_tokens=8, logit_bias={"5": 1.5}, stop=["x", "yy"])),
        (COMPLETIONS, completion([5, 6, 7], seed=1, max_tokens=8, n=2, return_token_ids=True)),
        (COMPLETIONS, completion([[5, 6], [7]], seed=1, max_tokens=8)),
        (COMPLETIONS, completion(["five", "six"], seed=1, max_tokens=8, logprobs=2)),
        (CHAT, {"model": "holdfast-sim", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 8}),
        (COMPLETIONS, completion([5, 10**6])),
        (COMPLETIONS, completion("hello", temperature=9)),
        (COMPLETIONS, completion("hello", max_tokens=10**6)),
        (CHAT, {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}),
        (CHAT, {"model": "holdfast-sim", "messages": [{"role": "queen", "content": "hi"}]}),
    ],
)
def test_a_large_body_is_answered_as_a_small_one(deployment: Deployment, path: str, body: dict[str, Any]) -> None:
    """The way through another process changes neither answers nor refusals."""
    small, large = ask(deployment.port, path, body), ask(deployment.port, path, padded(body))
    assert large.status == small.status
    if small.status == 200:
        assert {**large.json(), "id": "", "created": 0} == {**small.json(), "id": "", "created": 0}
    else:
        assert large.error == small.error


@pytest.mark.parametrize("chars", [100_000, 300_000])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "1" * 5000])
def test_a_value_that_json_has_not_is_named_in_a_body_of_any_size(
    deployment: Deployment, value: str, chars: int
) -> None:
    """The refusal is that of a small body, field and all."""
    body = json.dumps(completion("hi", temperature=1.5)).replace("1.5", value)
    small = ask(deployment.port, COMPLETIONS, body.encode())
    large = ask(deployment.port, COMPLETIONS, (body[:-1] + f', "user": "{"x" * chars}"}}').encode())
    assert (small.status, large.status) == (400, 400)
    assert large.error == small.error


def test_what_cannot_fit_is_refused_before_all_of_it_is_tokenized(deployment: Deployment) -> None:
    """By its context, with a count that is enough to know it."""
    text = "some words here " * 60_000  # 180,000 tokens, where the context is 32,768
    reply = ask(deployment.port, CHAT, {"model": "holdfast-sim", "messages": [{"role": "user", "content": text}]})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert "at least" in reply.error["message"]


def test_a_client_that_leaves_while_its_body_is_read_is_counted_as_one(
    frontend: MeteredFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cancelled, which no alert on errors should see."""
    reading = threading.Event()

    async def read_for_ever(*asked: object) -> NoReturn:
        reading.set()
        await asyncio.sleep(10 * WAIT_S)
        raise AssertionError

    monkeypatch.setattr(large_bodies.LargeBodies, "parse", read_for_ever)
    before = outcomes(frontend.port)
    with Raw(frontend.port) as raw:
        raw.post(COMPLETIONS, padded(completion("hi", max_tokens=1)))
        assert reading.wait(WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while (now := outcomes(frontend.port)) == before:
        assert time.monotonic() < deadline_s
    assert now - before == Counter({"cancelled": 1, "left": 1})


def outcomes(port: int) -> Counter[str]:
    """Requests that are over, by outcome, and clients that left."""
    with Raw(port) as raw:
        page = raw.get("/metrics").reply().body.decode()
    found = re.findall(r'^dynamo_frontend_requests_total{.*status="(\w+)".*} (\S+)$', page, re.MULTILINE)
    left = re.findall(r"^dynamo_frontend_disconnected_clients_total\S* (\S+)$", page, re.MULTILINE)
    found += [("left", count) for count in left]
    counted: Counter[str] = Counter()
    for outcome, count in found:
        counted[outcome] += int(float(count))
    return counted


async def test_large_bodies_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that a body is refused at once as any overload is, and told to come back."""
    monkeypatch.setattr(large_bodies, "WAITING_BYTES_MAX", 100)
    large = large_bodies.LargeBodies(10**6, lambda cause: None)
    with pytest.raises(ApiError) as refused:
        await large.parse("completions", b" " * 101, {})
    assert (refused.value.status, refused.value.type, refused.value.retry_after_s) == (429, "overloaded_error", 1.0)


def test_too_many_requests_in_preparation_are_overload(
    frontend: MeteredFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """429 with Retry-After, as when the workers are full: clients and balancers know what to do with it."""
    asked = padded(completion("hi", max_tokens=1))
    for bound, value in (("PREPARING_MAX", 0), ("PREPARING_BYTES_MAX", len(asked) - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(app, bound, value)
            reply = ask(frontend.port, COMPLETIONS, asked)
        assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "overloaded_error", "1")
        assert reply.headers["x-holdfast-reason"] == "preparing"
    assert ask(frontend.port, COMPLETIONS, asked).status == 200, "what was refused holds nothing"
