"""The word a streaming client gets when its stream moves again after a failure: a comment, before the next chunk."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest

from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.raw_http import Raw, Reply, chat
from tests.rigs.mid_stream import kill_serving, serving, slow_down

CHAT = "/v1/chat/completions"
COMMENT = re.compile(r": resumed after (\d+\.\d{3}) s")
TOKENS = 150


@pytest.fixture(scope="module")
def pair() -> Iterator[Deployment]:
    """Two workers, both alive after every test."""
    with Deployment(workers=2, sim={"ttft_ms": 5, "tpot_ms": 5}) as started:
        yield started


def running(pair: Deployment) -> int:
    alive = [name for name in pair.worker_names if pair.processes[name].poll() is None]
    return sum(int(pair.worker_facts(name)["running"]) for name in alive)


def revive(pair: Deployment, name: str) -> None:
    pair.start_worker(name)
    pair.wait_until(lambda: len(pair.alive_workers()) == 2, "both workers to serve")


def body(stream: bool) -> dict[str, object]:
    return chat("hello", stream=stream, max_tokens=TOKENS, ignore_eos=True, seed=7)


def events(reply: Reply) -> list[str]:
    return reply.body.decode().removesuffix("\n\n").split("\n\n")


def text_of(reply: Reply) -> str:
    chunks = [event for event in reply.events() if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def unbroken(pair: Deployment) -> str:
    with Raw(pair.port) as raw:
        return str(raw.post(CHAT, body(stream=False)).reply().json()["choices"][0]["message"]["content"])


def test_a_comment_stands_before_the_next_chunk(pair: Deployment) -> None:
    """Killed in mid-stream: exactly one comment, with chunks before and after it, and the text is whole."""
    whole = unbroken(pair)
    slow_down(pair)
    with Raw(pair.port) as raw:
        raw.post(CHAT, body(stream=True))
        raw.sock.recv(1, socket.MSG_PEEK)  # the header comes with the first word
        victim = kill_serving(pair)
        reply = raw.reply()
    revive(pair, victim)
    found = [at for at, event in enumerate(events(reply)) if event.startswith(":")]
    assert len(found) == 1
    pause = COMMENT.fullmatch(events(reply)[found[0]])
    assert pause is not None
    assert float(pause[1]) > 0
    assert 1 < found[0] < len(events(reply)) - 2
    assert text_of(reply) == whole
    assert json.loads(events(reply)[-2][6:])["holdfast"] == {"resumed": 1, "exact": True}


def test_a_failure_before_the_first_word_is_told_with_it(pair: Deployment) -> None:
    """Killed before the first token: the comment is the first thing behind the header."""
    whole = unbroken(pair)
    slow_down(pair, 1000.0)
    with Raw(pair.port) as raw:
        raw.post(CHAT, body(stream=True))
        victim = kill_serving(pair)
        reply = raw.reply()
    revive(pair, victim)
    assert COMMENT.fullmatch(events(reply)[0])
    assert sum(event.startswith(":") for event in events(reply)) == 1
    assert text_of(reply) == whole


def test_a_whole_answer_has_no_comment(pair: Deployment) -> None:
    """An answer that is not streamed is one JSON body, failure or not."""
    whole = unbroken(pair)
    slow_down(pair)
    with Raw(pair.port) as raw:
        raw.post(CHAT, body(stream=False))
        victim = kill_serving(pair)
        answer = raw.reply().json()
    revive(pair, victim)
    assert answer["choices"][0]["message"]["content"] == whole
    assert answer["holdfast"]["resumed"] == 1


@pytest.mark.long
def test_a_client_that_does_not_read_is_told_when_it_does(pair: Deployment) -> None:
    """While nothing can be sent only the last word is kept; once it reads, that word and every token is there."""
    choices, tokens = 8, 500
    wide = chat("slow", n=choices, stream=True, max_tokens=tokens, ignore_eos=True, seed=7)
    wide |= {"logprobs": True, "top_logprobs": 20, "return_token_ids": True}  # kilobytes a token: buffers fill soon
    with Raw(pair.port, receive_bytes=4096) as raw:
        before = {name: pair.worker_facts(name)["tokens_total"] for name in pair.worker_names}
        raw.post(CHAT, wide)
        pair.wait_until(lambda: running(pair) == choices, "the streams to run")
        victim = serving(pair, choices // 2)
        made = 0.8 * tokens * pair.worker_facts(victim)["running"]
        pair.wait_until(lambda: pair.worker_facts(victim)["tokens_total"] - before[victim] > made, "full buffers")
        pair.kill(victim)
        pair.wait_until(lambda: running(pair) == 0, "the end of it")
        reply = raw.reply()
    revive(pair, victim)
    assert sum(bool(COMMENT.fullmatch(event)) for event in events(reply)) == 1
    chunks = [event["choices"][0] for event in reply.events() if event != "[DONE]"]
    for index in range(choices):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert sum(len(chunk.get("token_ids") or []) for chunk in mine) == tokens
