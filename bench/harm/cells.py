"""The checks that can end, drain, rest or refuse, and the four alarms that each is given. Data and injections only.

(a) a false alarm on the only worker, (b) a false alarm on all workers at once, (c) a true alarm on one of two, (d) a
true alarm on the only one. A cell that makes no sense for a check says why (`absent`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.harm.sites import Fleet, OnGpus, Pairs, Rolled
from bench.harm.watch import PROBE_TOKENS, TOKENS
from holdfast.testing.clients import Stream

CASES = {
    "a": "false alarm on the only worker",
    "b": "false alarm on all workers at once",
    "c": "true alarm on one of two",
    "d": "true alarm on the only one",
}
ACTIVE, STANDBY = "active", "standby"
POISON = 6001  # a token that no prompt and no answer of these has
# Longer than a canary's interval, its retries and a verdict; or than a node may be silent.
HOLD_S = 12.0
SILENT_S = 25.0
RESETS, RESET_EVERY_S = 3, 3.0  # what opens a breaker by its default settings
DEATHS = 3  # what convicts a request that is there each time
FATAL_XID = 79


@dataclass(frozen=True, slots=True)
class Cell:
    """One alarm of one check: the site it needs, and how it is raised. `inject` returns when the cause is over."""

    what: str
    site: Callable[[], Any] = field(default=lambda: None)
    inject: Callable[[Any], object] = field(default=lambda site: None)
    tokens: int = TOKENS
    quiet: bool = False  # no probes before the alarm was raised: a good answer would take it back
    absent: str = ""  # why there is no such cell


def _one(*more: str, **said: Any) -> Callable[[], Pairs]:
    return lambda: Pairs(1, *more, **said)


def _two(*more: str, **said: Any) -> Callable[[], Pairs]:
    return lambda: Pairs(2, *more, **said)


# -- alarms of pairs under a supervisor


def _while_on(kind: str, *states: str, numbers: tuple[int, ...] = (), **values: Any) -> Callable[[Pairs], None]:
    """A fault of these engines that stays for a while."""

    def inject(site: Pairs) -> None:
        for state in states or (ACTIVE, STANDBY):
            site.order(site.names(state, *numbers), kind, **values)
        time.sleep(HOLD_S)
        site.clear()

    return inject


def _disproved(kind: str, *numbers: int, **values: Any) -> Callable[[Pairs], None]:
    """The active engine is killed, and its standby's proof is wrong."""

    def inject(site: Pairs) -> None:
        site.order(site.names(STANDBY, *numbers), kind, **values)
        site.signal(signal.SIGKILL, ACTIVE, *numbers)

    return inject


def _resets(site: Pairs) -> None:
    for _ in range(RESETS):
        site.order(site.names(ACTIVE), "reset")
        time.sleep(RESET_EVERY_S)


def _late(site: Pairs) -> None:
    """Beats and answers to pings come late, and tokens in time."""
    names = site.names(ACTIVE)
    site.order(names, "late_beats", ms=3000)
    site.order(names, "late_pongs", ms=3000)
    time.sleep(HOLD_S)
    site.clear()


def _deaths(site: Pairs) -> None:
    """Engines die of other causes, again and again, with the same streams on them."""
    for turn in range(DEATHS):
        gone = site.signal(signal.SIGKILL, ACTIVE)
        if turn < DEATHS - 1:
            site.wait_until(partial(_are_back, site, gone), "pairs after a kill")


def _are_back(site: Pairs, gone: set[int]) -> bool:
    return site.restored() and not gone & {engine.pid for engine in site.engines()}


def _poison(site: Pairs) -> None:
    """A request whose prompt kills the engine that reads it; it fails by name, and no other stream with it."""
    body = {"model": site.served, "prompt": [1, 2, POISON, 3], "max_tokens": PROBE_TOKENS, "stream": True, "seed": 1}
    Stream(site.port, body, "/v1/completions").answer(120.0)


def _paused(seconds: float, *numbers: int) -> Callable[[Pairs], None]:
    """Engines stop and go on: the fence must keep the earlier owner out, whatever a standby has done meanwhile."""

    def inject(site: Pairs) -> None:
        site.signal(signal.SIGSTOP, ACTIVE, *numbers)
        time.sleep(seconds)
        site.signal(signal.SIGCONT, ACTIVE, *numbers)

    return inject


def _stopped(*numbers: int) -> Callable[[Pairs], None]:
    def inject(site: Pairs) -> None:
        site.signal(signal.SIGSTOP, ACTIVE, *numbers)

    return inject


def _accused(site: Pairs) -> None:
    """Canaries are wrong, and a verification of the weights says so too; both are false."""
    names = [*site.names(ACTIVE), *site.names(STANDBY)]
    site.order(names, "wrong_verify")
    site.order(names, "wrong_canaries")
    time.sleep(HOLD_S)
    site.clear()


def _lost(number: int) -> Callable[[Pairs], None]:
    """Both engines of a worker end: its capacity is gone until others have loaded."""

    def inject(site: Pairs) -> None:
        site.signal(signal.SIGKILL, STANDBY, number)
        site.signal(signal.SIGKILL, ACTIVE, number)

    return inject


# -- alarms of the others


def _fell_off(site: OnGpus, *names: str) -> None:
    """The driver tells that a GPU is gone, and its worker's process ends; another is started in its place."""
    site.xid(FATAL_XID, *names)
    for name in names:
        site.chaos(name, "device_error")
        site.processes[name].wait(60.0)
        site.start_worker(name)


# A promise that no worker here keeps, so that every sample says that capacity is missing; and one that they keep.
PROMISE = {"slo": {"tokens_per_s": 1e6}}
KEPT = {"slo": {"tokens_per_s": 400.0}}

CHECKS: dict[str, dict[str, Cell]] = {
    "canary": {
        "a": Cell("control's known questions are answered wrongly, clients rightly", _one(),
                  _while_on("wrong_canaries")),
        "b": Cell("the same on both workers", _two(), _while_on("wrong_canaries")),
        "c": Cell("every token of one worker's active engine is wrong", _two(),
                  _while_on("wrong_tokens", ACTIVE, numbers=(2,))),
        "d": Cell("every token of both engines of the only worker is wrong", _one(), _while_on("wrong_tokens")),
    },
    "proof": {
        "a": Cell("the active engine is killed, and its standby's proof is wrong once", _one(),
                  _disproved("wrong_proofs", times=1)),
        "b": Cell("the same on both workers at once", _two(), _disproved("wrong_proofs", times=1)),
        "c": Cell("one worker's active engine is killed, and every token of its standby is wrong", _two(),
                  _disproved("wrong_tokens", 2)),
        "d": Cell("the same on the only worker", _one(), _disproved("wrong_tokens")),
    },
    "breaker": {
        "a": Cell("three connection resets within 12 s", _one(), _resets, quiet=True),
        "b": Cell("the same on both workers", _two(), _resets, quiet=True),
        "c": Cell("every new request of one worker fails", _two(),
                  _while_on("error_every", numbers=(2,), every=1)),
        "d": Cell("every new request of the only worker fails", _one(), _while_on("error_every", every=1)),
    },
    "watchdog": {
        "a": Cell("beats and pongs are 3 s late, and tokens come in time", _one(), _late),
        "b": Cell("the same on both workers", _two(), _late),
        "c": Cell("one worker's active engine makes no step any more", _two(),
                  _while_on("wedge", ACTIVE, numbers=(2,))),
        "d": Cell("the same on the only worker", _one(), _while_on("wedge", ACTIVE)),
    },
    "poison": {
        "a": Cell("the active engine is killed three times, with the same streams on it", _one(), _deaths, 1600),
        "b": Cell("the same on both workers at once", _two(), _deaths, 1600),
        "c": Cell("a prompt that kills its engine", _two("--sim-poison-token", str(POISON)), _poison, 1600),
        "d": Cell("the same with one worker", _one("--sim-poison-token", str(POISON)), _poison, 1600),
    },
    "device": {
        "a": Cell("the kernel's log says that the GPU fell off the bus (Xid 79), and its worker works on",
                  lambda: OnGpus(1), lambda site: site.xid(FATAL_XID)),
        "b": Cell("the same of every worker's GPU", lambda: OnGpus(2), lambda site: site.xid(FATAL_XID)),
        "c": Cell("one worker's GPU is told lost, and its process ends", lambda: OnGpus(2),
                  lambda site: _fell_off(site, "worker-1")),
        "d": Cell("the same of the only worker; another is started", lambda: OnGpus(1),
                  lambda site: _fell_off(site, "worker-0")),
    },
    "level": {
        "a": Cell("a promise that no worker can keep: control says that capacity is missing", _one(levels=PROMISE),
                  lambda site: time.sleep(HOLD_S)),
        "b": Cell("the same with two workers", _two(levels=PROMISE), lambda site: time.sleep(HOLD_S)),
        "c": Cell("both engines of one worker end", _two(levels=KEPT), _lost(2)),
        "d": Cell("both engines of the only worker end", _one(levels=KEPT), _lost(1)),
    },
    "fence": {
        "a": Cell("the active engine stops for 2 s and goes on", _one(), _paused(2.0)),
        "b": Cell("the same on both workers", _two(), _paused(2.0)),
        "c": Cell("one worker's active engine stops for good", _two(), _stopped(2)),
        "d": Cell("the same on the only worker", _one(), _stopped()),
    },
    "weights": {
        "a": Cell("canaries are wrong and a verification finds damage; neither is so", _one(), _accused),
        "b": Cell("the same on both workers", _two(), _accused),
        "c": Cell("one worker's active engine reads damaged weights", _two(),
                  _while_on("memory_flip", ACTIVE, numbers=(2,))),
        "d": Cell("both engines of the only worker do", _one(), _while_on("memory_flip")),
    },
    "planner": {
        "a": Cell("the node tells nothing for 25 s, and its replica serves on", lambda: Fleet(1),
                  lambda site: site.pause_agent(SILENT_S), 2000),
        "b": Cell("the same with two replicas on it", lambda: Fleet(2), lambda site: site.pause_agent(SILENT_S), 2000),
        "c": Cell("engines and vault of one of two replicas are killed", lambda: Fleet(2),
                  lambda site: site.kill_replica()),
        "d": Cell("engines and vault of the only replica are killed", lambda: Fleet(1),
                  lambda site: site.kill_replica()),
    },
    "rollout": {
        "a": Cell("an update of the only worker whose known questions alone are answered wrongly", lambda: Rolled(1),
                  lambda site: site.update("--sim-fault", "wrong_canaries"), 2000),
        "b": Cell("the same with two workers", lambda: Rolled(2),
                  lambda site: site.update("--sim-fault", "wrong_canaries"), 2000),
        "c": Cell("an update of two workers whose every token is wrong", lambda: Rolled(2),
                  lambda site: site.update("--sim-fault", "wrong_tokens"), 2000),
        "d": Cell("the same of the only worker", lambda: Rolled(1),
                  lambda site: site.update("--sim-fault", "wrong_tokens"), 2000),
    },
}  # fmt: skip
