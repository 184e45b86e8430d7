"""One active engine, one standby, 32 open streams, and everything that may happen to the active one.

All cases run in one deployment, one after the other: first the streams unbroken, then with each hit. A stream survives
if its tokens and its text equal the unbroken run's and it ended with `[DONE]`. The stall is the worst gap between
two tokens of any stream, minus the unbroken run's worst gap. After each hit a new standby must come by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.testing.answers import Answer
from holdfast.testing.load import Load, Outcome, compare, hit_in_the_middle, run_streams
from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised

# Between the vault's end and the engine's: long enough for engines to have reattached, or not.
VAULT_AHEAD_S = 1.0


def _wake_fails(up: Supervised) -> None:
    standby = up.engine("standby")
    assert standby is not None
    up.chaos(standby.name, "wake_fails")
    kill_group(up.active().pid)


def _vault_first(up: Supervised, *, keeper_too: bool = False) -> None:
    active, (vault, keeper) = up.active().pid, up.vault_pids()
    for pid in (keeper, vault) if keeper_too else (vault,):
        os.kill(pid, signal.SIGKILL)
    time.sleep(VAULT_AHEAD_S)
    kill_group(active)


HITS: dict[str, Callable[[Supervised], Any]] = {
    "kill the group": lambda up: kill_group(up.active().pid),
    "kill only the parent": lambda up: os.kill(up.active().pid, signal.SIGKILL),
    "SIGTERM": lambda up: os.kill(up.active().pid, signal.SIGTERM),
    "SIGSTOP": lambda up: os.kill(up.active().pid, signal.SIGSTOP),
    "wedge": lambda up: up.chaos(up.active().name, "wedge"),
    "device error": lambda up: up.chaos(up.active().name, "device_error"),
    "wake fails": _wake_fails,
    "vault a second before": _vault_first,
    "vault and keeper before": partial(_vault_first, keeper_too=True),
}
# Worst stall in milliseconds, where there is a promise.
STALL_MS_MAX = {"kill the group": 150, "kill only the parent": 150, "SIGTERM": 150, "SIGSTOP": 3000}


def run_cases(
    up: Supervised, load: Load, names: tuple[str, ...] = tuple(HITS), unbroken: list[Answer] | None = None
) -> Iterator[tuple[str, Outcome, dict[str, Any]]]:
    """Each case by name, with what the clients saw and what the engines said afterwards; compared with the `unbroken`
    answers to the same load, which are asked for first where there are none."""
    unbroken = unbroken or uvloop.run(run_streams(up.port, load))
    for name in names:
        before = up.active().pid
        broken = uvloop.run(hit_in_the_middle(up, load, partial(HITS[name], up)))
        up.wait_restored(before)
        facts = up.active().facts
        more = {
            "standby_again_s": _standby_again_s(up, facts["failover"]),
            "recomputed_tokens_max": facts["recomputed_tokens_max"],
            "two_leaders": len(two_leaders(up.terms())),
            "timeline": {key: value for key, value in facts["failover"].items() if key.endswith("_ms")},
        }
        yield name, compare(name, unbroken, broken), more


def _standby_again_s(up: Supervised, failover: dict[str, Any]) -> float:
    """From the dead engine's last sign of life to the new standby, by their own words."""
    standby = up.engine("standby")
    assert standby is not None
    died_unix_s = failover["unix_s"] - failover["lock_ms"] / 1000
    again_s: float = standby.facts["entered_unix_s"] - died_unix_s
    return round(again_s, 2)
