"""`holdfast up --engine vllm` with open streams, and weights that turn out damaged."""

from __future__ import annotations

import contextlib

import pytest
import uvloop

from holdfast.testing.rig import fetch
from holdfast.testing.supervised import Supervised
from holdfast.testing.workload import Workload, compare, hit_in_the_middle, run_streams
from tests.rigs.engines.vllm_models import made

pytest.importorskip("vllm.version", reason="vllm is not installed here: make test-vllm")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

START_S = 400.0  # two engines, on a busy machine
OPTIONS = ("--kv-gib", "0.06", "--context", "1024", "--", "--enforce-eager")


def asked(up: Supervised, name: str) -> tuple[int, str]:
    """What an engine's own page answers to a wish to compare its weights."""
    status, body = fetch(up.records()[name]["status"], "/engine/verify", "POST", timeout_s=60.0)
    return status, body.decode()


def test_an_engine_with_damaged_weights_ends_and_streams_go_on() -> None:
    """Bits of what the active reads are flipped, and it is asked to compare: it says what is damaged and that it has to
    be started again, and ends. Every stream goes on at its standby, and a new engine stands by.
    After that all tokens are the unbroken run's, the weights are said to be right, and nobody ends any more."""
    load = Workload(streams=4, tokens=200, model="chat")
    model = str(made("chat"))
    with Supervised(
        "--engine", "vllm", "--allow-chaos", "--model", model, "--served-name", "chat", *OPTIONS, start_s=START_S
    ) as up:
        unbroken = uvloop.run(run_streams(up.port, load))
        active, standby = up.active(), up.engine("standby")
        assert standby is not None
        answers: list[tuple[int, str]] = []

        def hit() -> None:
            up.chaos(active.name, "flip_bits", seed=3)
            with contextlib.suppress(OSError):  # it may end before it can answer
                answers.append(asked(up, active.name))

        broken = uvloop.run(hit_in_the_middle(up, load, hit))
        outcome = compare("flip", unbroken, broken)
        assert (outcome.finished, outcome.resumed) == (load.streams, load.streams), (outcome, answers, up.logs())
        assert up.active().pid == standby.pid, (answers, up.logs())
        assert all(status != 200 for status, _ in answers), answers
        log = (up.folder / "logs" / f"{active.name}.log").read_text()
        assert "the weights are damaged" in log
        assert "cannot load its weights again: it must be restarted" in log
        up.wait_until(up.restored, "a standby in its place", START_S)
        pids = {engine.pid for engine in up.engines()}
        assert active.pid not in pids
        assert compare("after it", unbroken, uvloop.run(run_streams(up.port, load))).survived
        status, said = asked(up, up.active().name)
        assert (status, "as they were written" in said) == (200, True), said
        assert {engine.pid for engine in up.engines()} == pids
