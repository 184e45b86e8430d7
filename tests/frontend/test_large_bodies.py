"""One client's large body costs that client time, and nobody else: no turn of the loop reads it, copies a prompt for
each choice, or sends all of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from http_rig import Raw, Reply
from loop_rig import WAIT_S, MeteredFrontend

from holdfast.bench.deployment import Deployment, free_port
from holdfast.frontend import app, large_bodies
from holdfast.frontend.admission import LAUNCH_TOKENS_MAX
from holdfast.frontend.api.errors import ApiError
from holdfast.migration.dispatcher import Dispatcher
from holdfast.migration.flight import Flight

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGE = 15_000_000


@pytest.fixture(scope="module")
def frontend(deployment: Deployment) -> Iterator[MeteredFrontend]:
    with MeteredFrontend(deployment).running() as made:
        deadline_s = time.monotonic() + WAIT_S
        while ask(made.port, COMPLETIONS, completion("hi", max_tokens=1)).status != 200:
            assert time.monotonic() < deadline_s
        yield made


def ask(port: int, path: str, body: Any) -> Reply:
    with Raw(port) as raw:
        return raw.post(path, body).reply()


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "holdfast-sim", "prompt": prompt, **more}


def padded(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, in a body too large for the loop."""
    return {**body, "user": "x" * 300_000}


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


def test_what_cannot_fit_is_refused_before_all_of_it_is_tokenized(deployment: Deployment) -> None:
    """By its context, with a count that is enough to know it."""
    text = "some words here " * 60_000  # 180,000 tokens, where the context is 32,768
    reply = ask(deployment.port, CHAT, {"model": "holdfast-sim", "messages": [{"role": "user", "content": text}]})
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert "at least" in reply.error["message"]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def readers(pid: int) -> list[int]:
    return [child for child in children(pid) if b"body_reader" in command_line(child)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended while we looked


@pytest.fixture
def other(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with a frontend that may be killed in the place of its own."""
    port, settings = deployment.port, deployment._frontend_settings
    deployment.port = free_port()
    try:
        deployment.start_frontend("other")
        deployment.wait_until(lambda: deployment.health().get("status") == "ready", "the other frontend")
        assert ask(deployment.port, COMPLETIONS, padded(completion("hi", max_tokens=1))).status == 200
        yield deployment
    finally:
        deployment.kill("other")
        del deployment.processes["other"]
        deployment.port, deployment._frontend_settings = port, settings


def test_a_reader_ends_with_its_frontend(other: Deployment) -> None:
    """However the frontend ended."""
    (reader,) = readers(other.pid("other"))
    other.kill("other")
    other.wait_until(lambda: not Path(f"/proc/{reader}").exists(), "the reader to end")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_reader_costs_no_answer(other: Deployment, sent: signal.Signals) -> None:
    """Killed or stopped, the next body is read by another one; the loss is in the log and on the metrics page."""
    pid = other.pid("other")
    (reader,) = readers(pid)
    os.kill(reader, sent)
    assert ask(other.port, COMPLETIONS, padded(completion("hi", max_tokens=1))).status == 200
    assert reader not in readers(pid)
    cause = "died" if sent is signal.SIGKILL else "stopped"
    with Raw(other.port) as raw:
        page = raw.get("/metrics").reply().body.decode()
    assert re.search(rf'^holdfast_body_readers_lost_total{{.*cause="{cause}".*}} 1\.0$', page, re.MULTILINE)
    assert f"lost the reader of large bodies ({cause})" in other.log("other")


@pytest.fixture
def first_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a line of shell in the place of the first reader; those after it are real."""

    def put(line: str) -> None:
        script = tmp_path / "python"
        first = f"if mkdir {tmp_path}/first 2>/dev/null; then {line}; fi"
        script.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(large_bodies.sys, "executable", str(script))

    return put


@pytest.mark.parametrize(
    ("line", "cause"),
    [("head -c 8 >/dev/null; exit 1", "died"), ("kill -STOP $$", "stopped"), ("exec sleep 1000", "stuck")],
)
async def test_a_reader_that_will_not_answer_is_replaced(
    first_reader: Callable[[str], None], line: str, cause: str
) -> None:
    """Whatever became of it, its body is read by another one."""
    first_reader(line)
    lost: list[str] = []
    large = large_bodies.LargeBodies(10**6, lost.append)
    body = json.dumps(padded(completion("hi"))).encode()
    assert (await large.parse("completions", body, {})).prompts == ["hi"]
    assert lost == [cause]
    await large.close()


async def test_a_client_that_leaves_takes_its_reader_along(first_reader: Callable[[str], None]) -> None:
    """The answer would be taken for the next one's; that is no loss to be told, and the next body is read."""
    first_reader("exec sleep 1000")
    lost: list[str] = []
    large = large_bodies.LargeBodies(10**6, lost.append)
    body = json.dumps(padded(completion("hi"))).encode()
    asked = asyncio.create_task(large.parse("completions", body, {}))
    async with asyncio.timeout(WAIT_S):
        while large._reader is None:
            await asyncio.sleep(0.01)
    reader = large._reader.pid
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert not command_line(reader)
    assert (await large.parse("completions", body, {})).prompts == ["hi"]
    assert lost == []
    await large.close()


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


async def test_a_body_under_which_every_reader_dies_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second try, with a hint to come back."""
    monkeypatch.setattr(large_bodies.sys, "executable", "/bin/false")
    large = large_bodies.LargeBodies(10**6, lambda cause: None)
    with pytest.raises(ApiError) as refused:
        await large.parse("completions", b"{}", {})
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "reader_failed", 1.0)


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
    monkeypatch.setattr(app, "PREPARING_MAX", 0)
    reply = ask(frontend.port, COMPLETIONS, padded(completion("hi", max_tokens=1)))
    assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "overloaded_error", "1")
