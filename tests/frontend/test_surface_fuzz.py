"""Whatever a client sends, it gets an answer that names its cause, and the frontend holds nothing of it afterwards."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.frontend.api.errors import ApiError
from holdfast.frontend.api.fields import HARMLESS, REFUSED, SHARED
from holdfast.frontend.api.request import CHOICES_MAX
from holdfast.frontend.body_reader import PARSERS
from holdfast.testing.deployment import Deployment
from holdfast.testing.processes import fd_count, rss_bytes, thread_count
from tests.rigs.frontend.raw_http import Raw, Reply, chat

PATHS = ["/v1/chat/completions", "/v1/completions"]
FIELDS = sorted({*SHARED, *HARMLESS, *REFUSED, "messages", "prompt", "logprobs", "top_logprobs", "frobnicate"})
QUICK = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan"), float("inf"), -0.0]),
    st.floats(),
    st.text(max_size=6),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.sampled_from(["role", "content", "type", "text", "include_usage", "7"]), st.text(max_size=4)),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
# Small answers only: what is judged is the refusal of bad input, and work the engine does not have to do is not done.
base = {"model": "holdfast-sim", "max_tokens": 2}
one_field = st.builds(
    lambda key, value, stream: {**base, "stream": stream, key: value}, st.sampled_from(FIELDS), anything, st.booleans()
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"])}, optional={"content": anything, "name": anything}
    ),
    max_size=3,
)
many_fields = st.fixed_dictionaries(
    {name: st.just(value) for name, value in base.items()},
    optional={
        **{name: scalars for name in SHARED if name not in base},
        "messages": st.one_of(messages, anything),
        "prompt": st.one_of(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3), anything),
    },
)


class Held:
    """What the frontend held before, and must hold afterwards."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.pid = deployment.pid("frontend")
        self.connection = Raw(deployment.port)
        for _ in range(20):  # so that thread pools and tables are as large as they get
            self.connection.post(PATHS[0], chat("x" * 6000, stream=True)).reply()
        self.connection.post(PATHS[0], chat("x" * 400_000)).reply()  # large bodies have a reader, from the first on
        self.fds, self.threads = fd_count(self.pid), thread_count(self.pid)
        self.rss_bytes = rss_bytes(self.pid)

    def judge(self) -> None:
        assert self.deployment.processes["frontend"].poll() is None
        assert self.deployment.health()["status"] == "ready"
        self.deployment.wait_until(lambda: fd_count(self.pid) <= self.fds, "no more descriptors than before")
        assert thread_count(self.pid) <= self.threads + 4  # the default pool grows to its bound, once
        assert rss_bytes(self.pid) < self.rss_bytes + 64 * 1024 * 1024
        self.deployment.wait_until(lambda: self.deployment.health()["streams"] == 0, "all streams to end")
        self.deployment.wait_until(
            lambda: self.deployment.worker_facts("worker-0")["streams"] == 0, "the worker to idle"
        )
        assert "bug while" not in self.deployment.log("frontend")
        assert "Traceback" not in self.deployment.log("frontend")
        assert "Traceback" not in self.deployment.log("worker-0")


@pytest.fixture(scope="module")
def held(deployment: Deployment) -> Iterator[Held]:
    before = Held(deployment)
    yield before
    before.judge()
    before.connection.sock.close()


def judge(reply: Reply, *, body_known: bool = True) -> None:
    assert reply.status < 500, reply
    if reply.status == 200:
        return
    assert reply.status in (400, 404, 413, 429), reply
    error = reply.error
    if reply.status == 400 and body_known and error["code"] != "invalid_json":
        assert error["param"] is not None, error
        assert error["param"] in error["message"], error


@QUICK
@given(st.sampled_from(PATHS), one_field | many_fields)
def test_any_value_in_any_field(held: Held, path: str, fields: dict[str, Any]) -> None:
    """One field at a time, and many at once: 200 for a request that is sound, or a refusal that names the field."""
    asked = {"messages": chat()["messages"]} if path == PATHS[0] else {"prompt": "x"}
    body = json.dumps({**asked, **fields}, ensure_ascii=False).encode("utf-8", "replace")
    judge(held.connection.post(path, body).reply())
    judge_parsed(path, body)


def judge_parsed(path: str, body: bytes) -> None:
    """Read here, it is refused with a 400, or whatever it holds is of its type and within its bounds."""
    status = 0
    try:
        parsed = PARSERS["chat" if path == PATHS[0] else "completions"](body)
    except ApiError as error:
        status = error.status
    if status:
        assert status == 400
        return
    assert parsed.messages if parsed.kind == "chat" else parsed.prompts
    assert 1 <= parsed.n * max(1, len(parsed.prompts)) <= CHOICES_MAX
    assert all(type(message["content"]) is str for message in parsed.messages)
    assert parsed.seed is None or 0 <= parsed.seed < 2**63
    assert parsed.temperature is None or 0 <= parsed.temperature <= 2
    assert all(parsed.stops)


@QUICK
@given(st.sampled_from(PATHS), anything)
def test_any_json_as_a_body(held: Held, path: str, body: Any) -> None:
    """A body that is no object at all is called by that name."""
    judge(held.connection.post(path, json.dumps(body).encode()).reply())


@QUICK
@given(st.sampled_from(PATHS), st.binary(max_size=80), st.integers(0, 90), st.integers(0, 90))
def test_any_bytes_as_a_body(held: Held, path: str, junk: bytes, start: int, end: int) -> None:
    """Noise, and good JSON with noise in the middle: told what is wrong with it, on the same connection."""
    good = json.dumps(chat("café", max_tokens=2), ensure_ascii=False).encode()
    for body in (junk, good[:start] + junk + good[end:]):
        judge(held.connection.post(path, body).reply(), body_known=False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"model":"holdfast-sim","max_tokens":1,"metadata":' + b"[" * 400_000 + b"]" * 400_000 + b"}",
        b'{"model":"holdfast-sim","messages":' + b"[" * 900 + b"]" * 900 + b"}",
        b"\xff\xfe{\x00",
        b'{"model":"holdfast-sim\xc3"}',
        b'{"model":"\\ud800"}',
        b'{"model":"holdfast-sim","seed":' + b"9" * 500_000 + b"}",
        b'{"model":"holdfast-sim","temperature":NaN}',
        b'{"model":"holdfast-sim","temperature":1e999}',
        b"",
        b"\x00" * 1000,
        b'"' + b"a" * 1_000_000,
        b" " * 1_000_000,
    ],
)
def test_bodies_made_to_hurt(held: Held, path: str, body: bytes) -> None:
    """Deep nesting, endless numbers, half characters: 400, quickly, on the same connection."""
    reply = held.connection.post(path, body).reply()
    assert reply.status == 400
    assert reply.error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"max_tokens": 2**31 - 1}, "max_tokens"),
        ({"max_completion_tokens": 40_000, "max_tokens": None}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "messages"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ],
)
def test_absurd_values_are_refused_by_field(held: Held, changes: dict[str, Any], param: str) -> None:
    """Too many, too much, out of range: the field's name and the bound, whether streaming or not."""
    body = {key: value for key, value in {**chat(), **changes}.items() if value is not None}
    reply = held.connection.post(PATHS[0], body).reply()
    assert reply.status == 400
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    "prompt", [[10**9], [-1], [], [[]], "", [[1], "x"], ["x", None], [1.5], {"a": 1}, [[1] * 40_000], None]
)
def test_absurd_prompts_are_refused_by_name(held: Held, prompt: Any) -> None:
    """Ids the model does not have, nothing at all, more than fits."""
    reply = held.connection.post(PATHS[1], {"model": "holdfast-sim", "prompt": prompt, "max_tokens": 1}).reply()
    assert reply.status == 400
    assert reply.error["param"].startswith("prompt")


def test_noise_on_the_socket(held: Held) -> None:
    """Random bytes, and real requests with random bytes in them, on connections of their own: an answer or a close."""
    rng = random.Random(7)
    good = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    for _ in range(150):
        data = bytearray(good if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 300)))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with Raw(held.deployment.port) as raw:
            raw.send(bytes(data))
            if b"\r\n\r\n" in data or rng.random() < 0.5:
                raw.send(b"\r\n\r\n" + b"x" * 100_000)  # so that it is no request still to come
                reply = raw.reply()
                assert 400 <= reply.status < 500, (bytes(data), reply)
                assert reply.error["message"]
