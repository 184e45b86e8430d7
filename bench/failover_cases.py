"""One active engine, one standby, 32 open streams, and everything that may happen to the active one.

All cases run in one deployment, one after the other: first the streams unbroken, then with each hit. A stream survives
if its tokens and its text equal the unbroken run's and it ended with `[DONE]`. The stall is the worst gap between
two tokens of any stream, minus the unbroken run's worst gap. After each hit a new standby must come by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

from holdfast.failover.journal import two_leaders
from holdfast.testing.clients import Answer
from holdfast.testing.load import Load, Outcome, compare, run_streams
from holdfast.testing.supervised import Supervised, in_thread, kill_group

Hit = Callable[[Supervised], None]

# Between the vault's end and the engine's, as the issue asks: long enough for engines to have reattached, or not.
VAULT_AHEAD_S = 1.0


def _kill_group(up: Supervised) -> None:
    kill_group(up.active().pid)


def _kill_parent(up: Supervised) -> None:
    os.kill(up.active().pid, signal.SIGKILL)


def _terminate(up: Supervised) -> None:
    os.kill(up.active().pid, signal.SIGTERM)


def _stop(up: Supervised) -> None:
    os.kill(up.active().pid, signal.SIGSTOP)


def _wake_fails(up: Supervised) -> None:
    standby = up.engine("standby")
    assert standby is not None
    up.chaos(standby.name, "wake_fails")
    _kill_group(up)


def _vault_first(up: Supervised) -> None:
    active, (vault, _) = up.active().pid, up.vault_pids()
    os.kill(vault, signal.SIGKILL)
    time.sleep(VAULT_AHEAD_S)
    kill_group(active)


def _vault_and_keeper_first(up: Supervised) -> None:
    active, (vault, keeper) = up.active().pid, up.vault_pids()
    for pid in (keeper, vault):
        os.kill(pid, signal.SIGKILL)
    time.sleep(VAULT_AHEAD_S)
    kill_group(active)


def _device_error(up: Supervised) -> None:
    up.chaos(up.active().name, "device_error")


def _wedge(up: Supervised) -> None:
    up.chaos(up.active().name, "wedge")


HITS: dict[str, Hit] = {
    "kill the group": _kill_group,
    "kill only the parent": _kill_parent,
    "SIGTERM": _terminate,
    "SIGSTOP": _stop,
    "wedge": _wedge,
    "device error": _device_error,
    "wake fails": _wake_fails,
    "vault a second before": _vault_first,
    "vault and keeper before": _vault_and_keeper_first,
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
        broken = uvloop.run(_hit(up, load, HITS[name]))
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


async def _hit(up: Supervised, load: Load, hit: Hit) -> list[Answer]:
    """Run the load; once streams are well under way, hit."""
    before = await in_thread(up.tokens_total)
    running = asyncio.ensure_future(run_streams(up.port, load))
    enough = load.streams * load.tokens // 4
    await in_thread(up.wait_until, lambda: up.tokens_total() - before > enough, "streams under way")
    await in_thread(hit, up)
    return await running
