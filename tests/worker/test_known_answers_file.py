"""`canaries.json` is damaged under a pair of torch engines: no engine crashes for ever, and the service goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised

pytestmark = [
    pytest.mark.alone,
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

START_S = 180.0  # each engine imports torch; one of them twice


@pytest.fixture
def up() -> Iterator[Supervised]:
    options = ("--engine", "torch", "--model", "tiny", "--kv-gib", "0.05", "--torch-threads", "1", "--context", "256")
    with Supervised(*options, start_s=START_S) as started:
        yield started


def said(up: Supervised) -> list[int]:
    answer = up.stream("of answers", 20, seed=5, model="tiny", return_token_ids=True).answer()
    assert answer.wrong == ""
    return answer.tokens


def lose_the_active(up: Supervised) -> None:
    """The standby leads, and the engine that is started for the dead one comes to stand by."""
    active = up.active().pid
    kill_group(active)
    up.wait_restored(active, START_S)


def test_a_damaged_file_of_known_answers_costs_one_start_at_most(up: Supervised) -> None:
    """Garbage is set aside; an answer that was changed is withdrawn by the second start that contradicts it. After each
    the pair is whole again, its leader can be killed, and clients are answered as before."""
    before = said(up)
    (path,) = Path(up.folder).rglob("canaries.json")
    known = json.loads(path.read_text())
    path.write_bytes(b"\xff{garbage")
    lose_the_active(up)
    assert path.with_name("canaries.json.bad").read_bytes() == b"\xff{garbage"
    assert json.loads(path.read_text()) == known
    path.write_text(json.dumps({kind: [*tokens[:-1], tokens[-1] + 1] for kind, tokens in known.items()}))
    lose_the_active(up)
    assert json.loads(path.read_text()) == known
    assert "it is withdrawn" in up.logs(100_000)
    lose_the_active(up)
    assert said(up) == before
