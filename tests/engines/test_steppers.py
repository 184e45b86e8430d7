"""The threads that make an engine's steps, apart from any engine."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
BOUND_S = 60.0


@pytest.mark.parametrize("room", ["torch", "vllm"])
def test_a_stop_is_heard_whenever_it_comes(room: str) -> None:
    """Told just before the thread forgets that there was something to do, it ends all the same. What a vllm
    engine was told to do before is done."""
    failed: list[str] = []
    done: list[str] = []
    module: Any = import_module(f"holdfast.engines.{room}.stepper")
    stepper = module.Stepper(lambda *_: True, failed.append)
    work = stepper._work = threading.Event()
    forget = work.clear

    def stopped_before() -> None:
        if room == "vllm":
            stepper.act(lambda: done.append("the last act"))
        stepper._over = True
        work.set()
        forget()

    work.clear = stopped_before  # type: ignore[method-assign]
    stepper.start()
    stepper._thread.join(BOUND_S)
    assert not stepper._thread.is_alive()
    assert (failed, done) == ([], ["the last act"] if room == "vllm" else [])


def test_vllm_cannot_end_its_thread_in_silence() -> None:
    """An exit from within is a failure like any other: whoever waits hears of it, and so does the engine."""
    module: Any = import_module("holdfast.engines.vllm.stepper")
    failed: list[str] = []
    stepper = module.Stepper(lambda *_: True, failed.append)
    stepper.start()
    with pytest.raises(SystemExit, match="for a reason"):
        stepper.run(lambda: sys.exit("for a reason")).result(BOUND_S)
    stepper.act(lambda: sys.exit("for another"))
    stepper._thread.join(BOUND_S)
    assert failed == ["SystemExit: for another"]
