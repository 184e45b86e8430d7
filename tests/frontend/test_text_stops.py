"""Stop strings are found wherever they fall, and nothing else is withheld."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.frontend.text.stops import StopWatcher

# Few, of which two are syntax to a regular expression.
stop_sets = st.lists(st.text("a^\\", min_size=1, max_size=4), max_size=4).map(tuple)
pieces_of_text = st.lists(st.text("ab^\\", max_size=4), max_size=12)


def naive(text: str, stops: tuple[str, ...], include: bool, passed: int = 0) -> tuple[str, str | None]:
    """The text up to the stop string completed first, looking at one more character at a time."""
    for end in range(passed + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(pieces_of_text, stop_sets)
def test_withholds_exactly_what_may_still_become_a_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    """After each piece the text not yet emitted is the longest end that begins a stop string."""
    watcher = StopWatcher(stops)
    text = emitted = ""
    for piece in pieces:
        emit, hit = watcher.push(piece)
        if hit is not None:
            return
        text, emitted = text + piece, emitted + emit
        ends = [text[-size:] for size in range(1, len(text) + 1)]
        held = [end for end in ends if any(stop.startswith(end) and stop != end for stop in stops)]
        assert text == emitted + max(held, key=len, default="")


@settings(max_examples=500)
@given(st.just([]) | pieces_of_text, pieces_of_text, stop_sets, st.booleans())
def test_equals_a_search_over_the_whole_text(
    passed: list[str], pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    """However the text is cut, the emitted text and the hit are those of a search over all of it: of the first stop
    string that is complete after the text that is passed by, in which it may begin."""
    watcher = StopWatcher(stops, include)
    emitted = "".join([watcher.pass_by(piece) for piece in passed])
    hit = None
    for piece in pieces:
        emit, hit = watcher.push(piece)
        emitted += emit
        if hit is not None:
            break
    else:
        emitted += watcher.flush()
    assert (emitted, hit) == naive("".join(passed + pieces), stops, include, len("".join(passed)))


def cpu_s(stops: tuple[str, ...], pieces: list[str]) -> float:
    """The least of several runs, of this thread only: what else runs on the machine is not in it."""
    spent: list[float] = []
    for _ in range(5):
        watcher = StopWatcher(stops)
        began_s = time.thread_time()
        assert all(watcher.push(piece)[1] is None for piece in pieces)
        spent.append(time.thread_time() - began_s)
    return min(spent)


def test_many_long_stop_strings_cost_little_more_than_a_short_one() -> None:
    """Every stream shares the loop with the one that asked for them."""
    words = [" the", " of", " stone", " river", " quick", " as", " said", " time"] * 500
    many = tuple(f"{word} {'x' * 500}{place}" for place, word in enumerate(words[:16]))
    one_s, many_s = cpu_s((" zzz",), words), cpu_s(many, words)
    print(f"a token costs {one_s / len(words) * 1e6:.1f} us with one, {many_s / len(words) * 1e6:.1f} us with sixteen")
    assert many_s < 4 * one_s
