"""The judge of streamed answers itself."""

from __future__ import annotations

import json

import pytest

from holdfast.testing.answers import Answer, difference, read_events

RIGHT = Answer("one two", [1, 2], "length", done=True)


def chunk(text: str, ids: list[int], finish: str | None = None) -> tuple[float, str]:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": finish}
    return 0.0, "data: " + json.dumps({"choices": [choice], "holdfast": {"resumed": 1, "exact": True}})


EVENTS = [chunk("one ", [1]), (0.0, ": queued 1"), chunk("two", [2], "length")]
DONE = (0.0, "data: [DONE]")


def test_an_answer_is_put_together() -> None:
    """Text, tokens and end of one choice, how often it was resumed, and how often its client was told to wait."""
    answer = read_events([*EVENTS, DONE])
    assert difference(RIGHT, answer) == ""
    assert (answer.resumed, answer.waiting, answer.wrong) == (1, 1, "")


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        (EVENTS, "no [DONE]"),
        ([*EVENTS, DONE, EVENTS[0]], "an event after [DONE]"),
        ([EVENTS[0], (0.0, 'data: {"error": {"message": "gone"}}')], "gone"),
        ([EVENTS[0], chunk("too", [3], "length"), DONE], "token 1 differs"),
        ([chunk("one", [1], "length"), DONE], "1 tokens"),
        ([EVENTS[0], chunk("two", [2], "stop"), DONE], "'stop' 'one two' instead of 'length'"),
    ],
)
def test_a_wrong_answer_is_seen(events: list[tuple[float, str]], wrong: str) -> None:
    """Another token, a lost end, an error and another reason of the end are all differences."""
    assert wrong in difference(RIGHT, read_events(events))


def test_a_part_is_right_only_for_who_left_early() -> None:
    """The beginning of an answer is right for them, what is not its beginning for nobody, and nor is an error."""
    assert difference(RIGHT, Answer("one", [1]), part=True) == ""
    assert difference(RIGHT, Answer("two", [2]), part=True) != ""
    assert difference(RIGHT, Answer("one", [1], error={"message": "gone"}), part=True) == "gone"
