"""Workers that a frontend cannot look at: real processes, and a frontend in a PID namespace of its own, as on another
host. Frozen ones are found by silence and an unanswered question, slow ones never."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.testing.deployment import Deployment
from tests.rigs.mid_stream import serving

ELSEWHERE = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_be_elsewhere() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(not can_be_elsewhere(), reason="this user may not make a PID namespace here"),
    pytest.mark.alone,
]


class Apart(Deployment):
    """Its frontend sees no process but itself."""

    def start_role(self, role: str, name: str, settings: dict[str, Any]) -> None:
        if role != "frontend":
            super().start_role(role, name, settings)
            return
        launch = {"state_dir": str(self.folder), "name": name, **settings}
        self.start(name, [*ELSEWHERE, sys.executable, "-m", "holdfast.roles", role, json.dumps(launch)])

    def shown(self, name: str) -> dict[str, Any]:
        """A worker, as the frontend sees it."""
        return next((worker for worker in self.health().get("workers", []) if worker["name"] == name), {"verdict": ""})

    def wait_verdict(self, name: str, verdict: str) -> float:
        return self.wait_until(lambda: self.shown(name)["verdict"] == verdict, f"{name} to be {verdict}")

    def said_of(self, name: str, since: int = 0) -> list[str]:
        """Changes of verdict that the frontend's log tells of it, after so many characters."""
        lines = self.log("frontend")[since:].splitlines()
        return [line.partition(f"{name}: ")[2] for line in lines if f"{name}: " in line and " -> " in line]


@pytest.fixture
def pair() -> Iterator[Apart]:
    with Apart(workers=2, sim={"ttft_ms": 5, "tpot_ms": 20}) as started:
        yield started


@pytest.mark.long
def test_a_worker_that_freezes_under_traffic_is_found_by_an_unanswered_question(pair: Apart) -> None:
    """Its streams go on elsewhere, each token once; and it was neither its silence alone nor a look at its process."""
    streams = [pair.stream(f"count to {number}", 200, seed=7).wait_tokens(3) for number in range(8)]
    victim = serving(pair)
    pair.signal(victim, signal.SIGSTOP)
    pair.wait_verdict(victim, "gone")
    told = pair.said_of(victim)[-1]
    assert re.match(r"suspect -> gone: silent for \d+\.\d s, and it does not answer", told), told
    answers = [stream.answer() for stream in streams]
    assert all(answer.error is None and answer.finish == "length" for answer in answers)
    pair.signal(victim, signal.SIGCONT)
    pair.wait_verdict(victim, "alive")
    again = [pair.stream(f"count to {number}", 200, seed=7).answer() for number in range(8)]
    assert [answer.text for answer in answers] == [answer.text for answer in again]


def test_an_idle_worker_that_freezes_is_found_too(pair: Apart) -> None:
    """Nobody waits for it, and the next request goes elsewhere at once."""
    victim = pair.worker_names[0]
    pair.signal(victim, signal.SIGSTOP)
    pair.wait_verdict(victim, "gone")
    assert [told.partition(":")[0] for told in pair.said_of(victim)[-2:]] == ["alive -> suspect", "suspect -> gone"]
    assert pair.stream("hello", 5).answer().error is None
    pair.signal(victim, signal.SIGCONT)


def test_an_idle_worker_whose_engine_hangs_is_found_by_its_silence_to_a_question(pair: Apart) -> None:
    """It beats as ever; only its loop does not go round. It gets no work until it answers again."""
    victim = pair.worker_names[0]
    pair.chaos(victim, "wedge")
    pair.wait_verdict(victim, "mute")
    assert pair.stream("hello", 5).answer().error is None
    pair.chaos(victim, "clear")
    pair.wait_until(lambda: pair.shown(victim)["verdict"] in ("alive", "probation"), "it to be trusted again")


@pytest.mark.long
def test_a_slow_worker_that_answers_loses_nothing(pair: Apart) -> None:
    """0.8 s a token, so that it is asked between any two, and answers that come as late: no stream is moved, nobody is
    given up."""
    for name in pair.worker_names:
        pair.chaos(name, "late_pongs", ms=800)
        pair.chaos(name, "slow", factor=40)
    since = len(pair.log("frontend"))
    answers = [stream.answer() for stream in [pair.stream(f"count {number}", 6) for number in range(4)]]
    assert all(answer.error is None for answer in answers)
    assert pair.health()["resumed_total"] == 0
    given_up = [told for name in pair.worker_names for told in pair.said_of(name, since)]
    assert not [told for told in given_up if "gone" in told or "deaf" in told or "wedged" in told], given_up


def test_the_frontend_is_elsewhere(pair: Apart) -> None:
    """What the tests above rest on."""
    frontend = next(pid for pid in pair.pids() if pid != pair.pid("frontend") and _is_frontend(pid))
    assert os.readlink(f"/proc/{frontend}/ns/pid") != os.readlink("/proc/self/ns/pid")


def _is_frontend(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    return b"frontend" in words and b"unshare" not in words[0]
