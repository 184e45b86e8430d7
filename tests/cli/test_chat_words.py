"""What a chat makes of a server's bytes, and how an answer looks on a terminal."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.chat.server import (
    EVENT_BYTES_MAX,
    AnswerEnd,
    AnswerReader,
    AnswerResumed,
    AnswerText,
    AnswerWaits,
    ChatTrouble,
    Event,
    Server,
)
from holdfast.cli.chat.talk import Conversation, RequestParameters
from holdfast.cli.chat.view import IN_LINE, MARK, WAITING, MarginView, notes
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import UserError
from holdfast.settings import Looks
from tests.rigs.cli.pseudo_terminal import screen_of

END = AnswerEnd("stop", True)


def chunk(text: str, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


ANSWER = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    + chunk("Hé")
    + b": provisioning\n\n: waiting\n\n: queued 3\n\n: queued\n\n: something else\n\n: resumed after 0.032 s\n\n"
    + chunk("llo", holdfast={"resumed": 1, "exact": True})
    + chunk("", "length", holdfast={"resumed": 1, "exact": False})
    + b'data: {"choices":[],"usage":{}}\r\n\r\n'
    + b"data: [DONE]\n\n"
)
EVENTS = [
    AnswerText("Hé"),
    AnswerWaits(),
    AnswerWaits(),
    AnswerWaits(3),
    AnswerResumed(0.032),
    AnswerText("llo"),
    AnswerEnd("length", False),
]


def read(pieces: list[bytes]) -> list[Event]:
    reader = AnswerReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, len(ANSWER)])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    """An answer is the same events however its bytes arrive."""
    assert read([ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]) == EVENTS


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ({"message": "no worker", "type": "service_unavailable_error", "code": "NoWorker"}, True),
        ({"message": "3 engines died", "type": "server_error", "code": "PoisonedRequest"}, False),
        ({"message": "too long", "type": "invalid_request_error", "code": None}, False),
    ],
)
def test_an_error_event_is_one_line(error: dict[str, object], again: bool) -> None:
    """An error in the stream is told with its message; asking again is offered where it may help."""
    with pytest.raises(ChatTrouble, match=f"^the answer broke off: {error['message']}$") as raised:
        read([chunk("x"), f"data: {json.dumps({'error': error})}\n\n".encode()])
    assert raised.value.again is again


def test_an_event_without_an_end_is_refused() -> None:
    """A server that never ends an event costs bounded memory, in one line or in many."""
    for piece in (b"data: " + b"x" * 65_536, b"data: " + b"x" * 65_536 + b"\n"):
        with pytest.raises(ChatTrouble, match="without an end"):
            read([piece] * (EVENT_BYTES_MAX // 65_536 + 2))


def test_what_is_no_answer_is_said_to_be_none() -> None:
    """Data that is no chunk is trouble, not a traceback."""
    for data in (b"data: nonsense\n\n", b'data: {"choices":[{"delta":{"content":3}}]}\n\n', b"data: []\n\n"):
        with pytest.raises(ChatTrouble, match="not a chat answer"):
            read([data])


# -- the screen

WIDTH = 20
COLOURS = Looks(colour=True, dumb=False)


def show(*acts: str | float | None, ended: AnswerEnd | None = END) -> list[str]:
    """Text, a pause in seconds for a resumption, None for waiting."""
    out = io.StringIO()
    view = MarginView(Terminal(out, WIDTH, COLOURS))
    for act in acts:
        if isinstance(act, str):
            view.add_text(act)
        elif act is None:
            view.show_waiting()
        else:
            view.add_pause(act)
    view.end(ended)
    return screen_of(out.getvalue())


def body(lines: list[str]) -> list[str]:
    """The answer's lines, the notes left out."""
    note = next((at for at, line in enumerate(lines) if "this answer" in line), len(lines))
    return [line.rstrip() for line in lines[:note] if line.strip()]


def test_words_are_wrapped_and_moved() -> None:
    """A word that grows past the line's end moves to the next line whole; a word longer than a line is broken."""
    assert body(show("one two three fo", "ur", "teen fif")) == ["  one two three", "  fourteen fif"]
    assert body(show("a ", "x" * 20)) == ["  a " + "x" * 15, "  " + "x" * 5]
    assert show("\n first\n\n    more\n\n") == ["  first", "", "      more", ""]
    assert show("a" * 17, " \n", "b") == ["  " + "a" * 17, "  b", ""]


def test_the_mark_stands_in_the_next_margin() -> None:
    """The line after the resumption has the mark; where no line follows, the last one has it."""
    lines = show("one two three ", 0.032, "four five six seven eight nine")
    assert body(lines) == ["  one two three", f"{MARK} four five six", "  seven eight nine"]
    assert " ".join(" ".join(lines).split()).endswith("continued after 32 ms")
    assert body(show("one ", 0.5, "two")) == [f"{MARK} one two"]
    assert body(show(0.5, "one\ntwo")) == [f"{MARK} one", "  two"]
    assert body(show("one ", 0.5, "two\n\n")) == [f"{MARK} one two"]


def test_waiting_is_shown_while_it_lasts() -> None:
    """The note is below the text while no engine is up, and gone without a trace when the text goes on."""
    assert show("one two", None, None)[0].rstrip() == "  one two"
    assert body(show("one two thr", None, 2.5, "eefolded four")) == ["  one two", f"{MARK} threefolded four"]
    out = io.StringIO()
    view = MarginView(Terminal(out, 60, COLOURS))
    view.add_text("one")
    view.show_waiting()
    assert screen_of(out.getvalue()) == ["  one", WAITING]
    view.add_text(" two")
    view.show_waiting(3)
    assert screen_of(out.getvalue()) == ["  one two", IN_LINE.format(3)]
    view.show_waiting(2)
    assert screen_of(out.getvalue()) == ["  one two", IN_LINE.format(2)]


def test_a_model_cannot_move_the_cursor() -> None:
    """Escape sequences in an answer are not obeyed."""
    assert body(show("a\x1b[2Jb\rc\x07\x9b1Ad")) == ["  a[2Jbc1Ad"]


@given(st.lists(st.text(st.sampled_from("ab \n\tñ"), max_size=30), max_size=12), st.integers(0, 12))
def test_no_word_is_lost_and_no_line_is_too_long(pieces: list[str], at: int) -> None:
    """Whatever is said in whatever pieces: every letter is on the screen in its order, and no line touches the edge."""
    acts: list[str | float | None] = [*pieces[:at], None, 0.1, *pieces[at:]]
    lines = body(show(*acts))
    assert all(len(line) < WIDTH for line in lines)
    assert "".join("".join(line[2:] for line in lines).split()) == "".join("".join(pieces).split())
    assert all(line[:2] in ("  ", f"{MARK} ", MARK) for line in lines)
    assert sum(line.startswith(MARK) for line in lines) <= 1
    if "".join(pieces[at:]).strip():
        assert any(line.startswith(MARK) for line in lines)


def test_notes_say_what_happened() -> None:
    """One line for all deaths under an answer, one for an answer that was cut off."""
    cut = "↻ this answer was interrupted"
    assert notes([], END) == []
    assert notes([0.0324], END) == [f"{cut}; it continued after 32 ms"]
    assert notes([0.04, 1.25], None) == [f"{cut} 2 times; it continued after 40 ms, 1.2 s"]
    assert "the rest may differ" in notes([0.04], AnswerEnd("stop", False))[0]
    assert notes([], AnswerEnd("length", True)) == ["… the answer was cut off at its limit of tokens"]


# -- what is asked


def test_the_conversation_goes_with_every_question() -> None:
    """Answered and stopped questions are kept with what was shown; unanswered ones are asked again or replaced."""
    talk = Conversation("m", RequestParameters("be brief", 5, 0.0, 7))
    talk.unanswered = "one"
    assert talk.request() == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}],
        "max_tokens": 5,
        "temperature": 0.0,
        "seed": 7,
    }
    talk.add_answer("1")
    talk.unanswered = "two"
    assert [message["content"] for message in talk.request()["messages"]] == ["be brief", "one", "1", "two"]
    talk.unanswered = "three"
    talk.add_answer("")
    assert [message["content"] for message in talk.messages] == ["one", "1"]
    talk.start_over()
    assert talk.messages == []


def test_urls_as_people_type_them() -> None:
    """With or without scheme and /v1; what is none is refused with an example."""
    for text in ("127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"):
        assert Server.at(text).url == "http://127.0.0.1:8000"
    for text in ("ftp://x", "http://", "http://x:port", "http://x:99999"):
        with pytest.raises(UserError, match=r"e\.g\. http://127\.0\.0\.1:8000"):
            Server.at(text)
    with pytest.raises(UserError, match="--api-key"):
        Server.at("http://x", "a\nb: c")
