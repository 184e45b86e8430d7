"""What answers mean: a table of conversations, and what silence never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spec.jobs import Probes
from holdfast.supervise.probes import Answer, Asked, answer_of, weigh

PROBES = Probes(failure_threshold=3)
WORDS = {"y": Answer.YES, "n": Answer.NO, ".": Answer.SILENCE}


def condemned_at(conversation: str, probes: Probes = PROBES) -> list[int]:
    """After which answers to /live the process is condemned; `y`es, `n`o, or `.` for silence."""
    asked, when = Asked(), []
    for place, letter in enumerate(conversation, 1):
        asked, why = weigh(asked, WORDS[letter], Answer.NO, probes)
        if why:
            when.append(place)
    return when


@pytest.mark.parametrize(
    ("conversation", "condemned"),
    [
        ("yyyy", []),
        ("nn", []),
        ("nnn", [3]),
        ("nnnnnn", [3]),  # once; it is being killed
        ("nnynn", []),
        ("nnynnn", [6]),
        ("........", []),
        ("nn......", []),
        ("n.n.n", [5]),  # silence between proves nothing either way
        ("nn.y.n", []),
    ],
)
def test_refusals_in_a_row(conversation: str, condemned: list[int]) -> None:
    """Only explicit refusals count, a yes forgives them, and silence is no answer."""
    assert condemned_at(conversation) == condemned


@given(st.text(alphabet="yn.", max_size=60), st.integers(1, 5))
def test_silence_could_be_left_out(conversation: str, threshold: int) -> None:
    """Whoever is condemned would have been without the silences too, and the other way round."""
    probes = Probes(failure_threshold=threshold)
    spoken = conversation.replace(".", "")
    assert len(condemned_at(conversation, probes)) == len(condemned_at(spoken, probes))


@pytest.mark.parametrize("ready", list(Answer))
def test_readiness_is_shown_and_condemns_nobody(ready: Answer) -> None:
    """However /health answers, a live process stays."""
    asked = Asked()
    for _ in range(100):
        asked, why = weigh(asked, Answer.YES, ready, PROBES)
        assert not why
    assert str(asked) == {Answer.YES: "ready", Answer.NO: "not ready", Answer.SILENCE: "silent"}[ready]


def test_codes_as_answers() -> None:
    """200 is yes, any other code no, and no code silence."""
    assert [answer_of(code) for code in (200, 204, 503, 404, None)] == [
        Answer.YES,
        Answer.NO,
        Answer.NO,
        Answer.NO,
        Answer.SILENCE,
    ]
