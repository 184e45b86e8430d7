"""A manifest's upgrade with real processes: store, control, frontends and workers, and streams that go on meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.rigs.roles.kept_manifest import Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long]
EXAMPLES = Path(__file__).parents[2] / "examples"
STREAMS = 8


async def test_an_upgrade_loses_no_stream() -> None:
    """Streams that began in the old version end in it, whole and exact, though one of its workers is killed meanwhile;
    who asks after the upgrade is answered by the new one, and the frontend is the same process all the while."""
    first, second = ((EXAMPLES / f"upgrade-v{number}.yaml").read_text() for number in (1, 2))
    with Kept() as site:
        async with site.kept(first) as rolling:
            await site.in_place(rolling, 1)
            (frontend,) = [slot for slot in site.supervisor.slots.values() if slot.job.role == "frontend"]
            pid, old = frontend.life.pid, site.workers()
            # Those that must outlive their worker, and those that end while it drains.
            streams = [site.stream(f"story {n}", 200 + 200 * (n % 2), model="holdfast-sim") for n in range(STREAMS)]
            for stream in streams:
                await asyncio.to_thread(stream.wait_tokens, 5)
            assert await site.apply(rolling, second) == 2
            await site.until(lambda: len(site.workers()) == 3, "a new worker")
            os.kill(site.supervisor.slots[old[0]].life.pid, signal.SIGKILL)
            await site.in_place(rolling, 2)
            answers = [await asyncio.to_thread(stream.answer) for stream in streams]
            assert [(one.wrong, one.exact) for one in answers] == [("", True)] * STREAMS, site.told
            assert not set(old) & set(site.workers())
            assert (len(site.workers()), frontend.life.pid) == (2, pid)
            late = await asyncio.to_thread(site.stream("again", 5, model="holdfast-sim").answer)
            assert late.wrong == ""


async def test_a_failover_pair_is_replaced_by_another() -> None:
    """With its vault, on a device of its own; streams end in the pair that they began in, and then nothing of that is
    left."""
    first = (EXAMPLES / "failover.yaml").read_text()
    second = first.replace("args: [", 'args: [--sim-tpot-ms, "9", ')
    assert second != first
    with Kept() as site:
        async with site.kept(first) as rolling:
            await site.in_place(rolling, 1)
            old = {name for name in site.supervisor.slots if "worker" in name}
            assert len(old) == 3, "two engines and their memory"
            stream = site.stream("story", 300, model="holdfast-sim")
            await asyncio.to_thread(stream.wait_tokens, 5)
            await site.apply(rolling, second)
            await site.in_place(rolling, 2)
            answer = await asyncio.to_thread(stream.answer)
            assert (answer.wrong, answer.exact) == ("", True), site.told
            new = {name for name in site.supervisor.slots if "worker" in name}
            assert (len(new), old & new) == (3, set())
