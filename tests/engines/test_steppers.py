"""The threads that make an engine's steps, apart from any engine."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
BOUND_S = 60.0


@pytest.mark.parametrize(("room", "kind"), [("torch", "TorchStepThread"), ("vllm", "VllmStepThread")])
def test_a_stop_is_heard_whenever_it_comes(room: str, kind: str) -> None:
    """Told just before the thread forgets that there was something to do, it ends all the same. What a vllm
    engine was told to do before is done."""
    failed: list[str] = []
    done: list[str] = []
    module: Any = import_module(f"holdfast.engines.{room}.stepper")
    stepper = getattr(module, kind)(lambda *_: True, failed.append)
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
    stepper = module.VllmStepThread(lambda *_: True, failed.append)
    stepper.start()
    with pytest.raises(SystemExit, match="for a reason"):
        stepper.run(lambda: sys.exit("for a reason")).result(BOUND_S)
    stepper.act(lambda: sys.exit("for another"))
    stepper._thread.join(BOUND_S)
    assert failed == ["SystemExit: for another"]


class _Core:
    """vLLM's, as far as a step thread sees it: `ran` are the streams of each step; `room` is what steps wait for."""

    def __init__(self, room: bool = True) -> None:
        self.streams, self.ran, self.room, self.tried = 0, list[int](), room, threading.Event()
        self.scheduler = self
        self.batch_queue = None
        self.tries = 0

    def has_requests(self) -> bool:
        return self.streams > 0

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self.tries += 1
        if self.room:
            self.ran.append(self.streams)
            self.streams = 0
        self.tried.set()
        return {}, self.room

    def post_step(self, *, model_executed: bool) -> None: ...

    def add(self) -> None:
        self.streams += 1


def _stepper(core: _Core) -> Any:
    module: Any = import_module("holdfast.engines.vllm.stepper")
    stepper = module.VllmStepThread(lambda *_: True, lambda _: None)
    stepper.serve(core)
    return stepper


def test_vllms_first_step_is_of_all_who_come_back() -> None:
    """One after the other, until nobody has come for a while; whoever comes later has the step behind."""
    core, later = _Core(), 3
    stepper = _stepper(core)

    def wait(_: float | None = None) -> bool:
        nonlocal later
        if later and not core.ran:
            later -= 1
            stepper.act(core.add)
            return True
        return stopped.wait(BOUND_S) if core.ran else False

    stopped = threading.Event()
    stepper._work.wait = wait
    stepper.gather()
    stepper.act(core.add)
    stepper.start()
    assert core.tried.wait(BOUND_S)
    stopped.set()
    stepper.stop()
    assert core.ran[0] == 4


def test_where_there_is_no_room_vllm_is_not_asked_without_a_pause() -> None:
    """A step that computed nothing and told nothing is tried again when something has happened, or after a while."""
    core = _Core(room=False)
    stepper = _stepper(core)
    slept: list[float] = []
    wait = stepper._work.wait
    stepper._work.wait = lambda s=None: slept.append(s) or wait(s)
    stepper.act(core.add)
    stepper.start()
    assert core.tried.wait(BOUND_S)
    stepper.stop()
    assert core.tries <= len(slept) + 1
