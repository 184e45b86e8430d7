"""SIGKILL under load, a tenth of `make prove-vault`: the vault, its keeper, both, and every process that uses them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from bench.vault import census as vault_census
from bench.vault.kills import CATEGORIES, Campaign
from bench.vault.watch import Watch
from holdfast.memory.client.weights import MemoryClient
from holdfast.testing.waiting import BOUND_S
from tests.rigs.memory.vaults import Rig, write

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1")) % 1_000_000


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_thirty_kills_under_load() -> None:
    """Committed bytes stay intact and importable, no reader sees what was not committed, published pages survive, and
    neither descriptors nor processes nor memory are left over."""
    done = Campaign(SEED, print).run(30)
    assert done.watch.wrong == []
    assert done.leaked == []
    assert {category: len(done.recover_ms[category]) for category in CATEGORIES} == dict.fromkeys(CATEGORIES, 5)
    assert done.watch.did["commit"] > 0, "how many there are depends on the seed and on how busy the machine is"
    assert done.watch.did["adopt"] > 0


@pytest.mark.processes
async def test_count_waits_until_the_vault_has_let_go_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vault that gets no CPU just when the counting client leaves has the same descriptors as one that does."""
    with Rig() as rig:
        async with rig.client(0) as writer:
            await write(writer)
        first = await asyncio.to_thread(vault_census.census, rig.path(), BOUND_S)
        counts, count = 0, vault_census._count
        leave = MemoryClient.close

        async def leave_unnoticed(client: MemoryClient) -> None:
            os.kill(rig.pids("server")[0], signal.SIGSTOP)
            await leave(client)

        def count_once_then_let_it_run(path: str, slabs: int, within_s: float) -> vault_census.Census:
            nonlocal counts
            counts += 1
            counted = count(path, slabs, within_s)
            os.kill(rig.pids("server")[0], signal.SIGCONT)
            return counted

        monkeypatch.setattr(MemoryClient, "close", leave_unnoticed)
        monkeypatch.setattr(vault_census, "_count", count_once_then_let_it_run)
        assert await asyncio.to_thread(vault_census.census, rig.path(), BOUND_S) == first
        assert counts > 1


def _watch(*story: tuple[str, dict[str, object]]) -> list[str]:
    watch = Watch()
    for at, (actor, said) in enumerate(story):
        if actor == "loss":
            watch.total_loss(float(at))
        else:
            watch.take(actor, {"at_s": float(at), **said})
    return watch.wrong


OWNS: dict[str, object] = {"owns": 1, "asked_s": 0.5, "fresh": True}
FRESH: dict[str, object] = {"owns": 2, "asked_s": 9.0, "fresh": True}
ADOPTS: dict[str, object] = {"owns": 2, "asked_s": 9.0, "fresh": False, "keys": ["a"], "reason": ""}


@pytest.mark.parametrize(
    ("story", "found"),
    [
        ([("r", {"saw": "x", "connected": True})], "none has offered"),
        ([("w", {"committing": "x"}), ("r", {"saw": "x", "connected": True})], ""),
        ([("r", {"wrong": "t0"})], "t0"),
        ([("o", OWNS), ("o", {"published": ["a", "b"], "connected": True}), ("p", ADOPTS)], "without 1 of 2"),
        ([("o", OWNS), ("o", {"published": ["a"], "connected": True}), ("p", ADOPTS)], ""),
        ([("o", OWNS), ("p", FRESH)], "should have survived"),
        ([("o", OWNS), ("loss", {}), ("p", FRESH)], "should have survived"),
        ([("o", OWNS), ("o", {"handing_over": 1}), ("loss", {}), ("p", FRESH)], ""),
        ([("w", {"committing": "x"}), ("w", {"committed": "x"}), ("r", {"empty": True, "asked_s": 9.0})], "no weights"),
        ([("r", {"open_fds": 7}), ("r", {"open_fds": 7}), ("r", {"open_fds": 12})], "12 open descriptors"),
    ],
)
def test_the_judge_sees_what_is_wrong(story: list[tuple[str, dict[str, object]]], found: str) -> None:
    """A broken promise is found in the words of the processes that saw it, and a kept one is not."""
    wrong = _watch(*story)
    assert bool(wrong) == bool(found)
    assert all(found in text for text in wrong)
