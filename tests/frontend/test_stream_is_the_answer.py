"""What a streaming client reads is the answer: byte for byte what the same request gets without streaming.

Everything goes through real processes and is read by `http.client`, on connections that are used again, so that a
body that ends early or late shows in the next answer too.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.frontend.text.tokenizer import TextTokenizer
from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.official_client import MODEL

WAIT_S = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Asker:
    """Asks the same thing twice on one kept-alive connection: streamed, and whole."""

    def __init__(self, port: int) -> None:
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            self._client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = self._client.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            self._client.close()  # the next request begins on a fresh connection
            raise
        assert response.status == 200, data
        return data

    def whole(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices, each as its text, ids and reasons."""
        answer = json.loads(self._post(path, body))
        return [
            {
                "text": choice["message"]["content"] if path == CHAT else choice["text"],
                "ids": choice["token_ids"],
                "reasons": (choice["finish_reason"], choice["stop_reason"]),
            }
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def streamed(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The same, put together from the events."""
        events = self._post(path, {**body, "stream": True}).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        made: dict[int, dict[str, Any]] = {}
        for event in events[:-2]:
            if event.startswith(":"):
                continue
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                mine = made.setdefault(choice["index"], {"text": "", "ids": [], "reasons": None})
                assert mine["reasons"] is None, "a chunk after the last one"
                mine["text"] += choice["delta"].get("content") or "" if path == CHAT else choice["text"]
                mine["ids"] += choice.get("token_ids") or []
                if choice["finish_reason"] is not None:
                    mine["reasons"] = (choice["finish_reason"], choice["stop_reason"])
        return [made[index] for index in sorted(made)]


@pytest.fixture(scope="module")
def asker(deployment: Deployment) -> Iterator[Asker]:
    made = Asker(deployment.port)
    yield made
    made.close()


def request(path: str, words: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    return {"model": MODEL, "max_tokens": 12, "return_token_ids": True, **asked, **more}


def with_plain(asker: Asker, path: str, body: dict[str, Any]) -> None:
    """Both ways, with and without ids in the chunks: chunks of text alone are made another way."""
    expected = asker.whole(path, body)
    assert asker.streamed(path, body) == expected
    plain = asker.streamed(path, {**body, "return_token_ids": False})
    assert plain == [{**choice, "ids": []} for choice in expected]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_stream_is_byte_for_byte_the_answer(asker: Asker, data: st.DataObject) -> None:
    """Any answer, any stop strings (most of them share something with the answer), any number of choices."""
    path = data.draw(st.sampled_from([CHAT, COMPLETIONS]))
    body = request(
        path,
        data.draw(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20)),
        n=data.draw(st.integers(1, 3)),
        seed=data.draw(st.integers(0, 2**31)),
        temperature=data.draw(st.sampled_from([0, 1, 2])),
        max_tokens=data.draw(st.integers(1, 24)),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    text = asker.whole(path, body)[0]["text"]
    stops = [data.draw(_near(text)) for _ in range(data.draw(st.integers(0, 3)))]
    with_plain(asker, path, {**body, "stop": stops} if stops else body)


def _near(text: str) -> st.SearchStrategy[str]:
    """A piece of the answer, or one that goes on differently than the answer does."""
    start, size = st.integers(0, max(0, len(text) - 1)), st.integers(1, 8)
    piece = st.builds(lambda at, length: text[at : at + length] or "x", start, size)
    return piece | st.builds(lambda head, tail: head + tail, piece, st.sampled_from([" END", "\u20ac", "."]))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_string_that_begins_like_the_answer_ends_nothing(asker: Asker, path: str) -> None:
    """The first output shows no text, because it may yet become the stop string: the stream goes on all the same."""
    body = request(path, "hello", seed=3)
    text = asker.whole(path, body)[0]["text"]
    with_plain(asker, path, {**body, "stop": [text[0] + " END"]})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_first_token_that_is_part_of_a_character_ends_nothing(
    asker: Asker, path: str, tokenizer: TextTokenizer
) -> None:
    """The first output shows no text, because its character is not whole: the stream goes on all the same."""
    for place in range(500):  # about one in twenty does
        body = request(path, f"hello {place}", max_tokens=4, temperature=0)
        first = asker.whole(path, {**body, "max_tokens": 1})[0]["ids"][0]
        if tokenizer.table.detokenizer().push(first) == "" and tokenizer.table.bytes_of(first):
            with_plain(asker, path, body)
            return
    raise AssertionError("no answer began with part of a character")
