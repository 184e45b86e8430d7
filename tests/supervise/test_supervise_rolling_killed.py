"""A rollout whose supervisor is killed at every step that it writes down: the next one goes on, and does nothing twice.

A real store, real supervisors, and tiny processes in place of frontends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from holdfast.rollout.machine import RolloutPhase, RolloutState
from holdfast.spec.jobs import Job
from holdfast.supervise.machine import Phase
from holdfast.supervise.rollout_controller import RolloutController
from tests.rigs.supervise.rollouts import Site, text

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(300)]
STEPS_MIN, STEPS_MAX = 6, 60  # of a rollout of two, by its memories: starts, counts, drains, ends; and a bound
SIZE = 2


class Mortal:
    """Ends a rollout's carrying out after so many memories that it wrote: before anything of the last is done (at every
    second one before the traffic record is written), or when all of it is begun."""

    def __init__(self, rolling: RolloutController, step: int, *, begins: bool) -> None:
        self.is_dead = False
        self._left = step
        self._write = rolling._writer.write
        self._carries_on, self._keep_history = not begins, rolling._keep_history
        self._state, self._write_traffic = rolling._writer._state, rolling._writer._traffic.write
        self._before = self._state.held
        self._between = not begins and step % 2 == 1
        rolling._writer._traffic.write = self._writes_traffic  # type: ignore[method-assign]
        rolling._writer.write = self._writes  # type: ignore[method-assign]
        rolling._keep_history = self._keeps  # type: ignore[method-assign]

    async def _writes(self, state: RolloutState) -> None:
        self._before = self._state.held
        await self._write(state)
        self._left -= self._state.held != self._before
        if self._left <= 0 and self._carries_on:
            await self._die()

    async def _writes_traffic(self, value: bytes) -> None:
        if self._between and self._left <= (self._state.held != self._before):
            await self._die()
        await self._write_traffic(value)

    async def _keeps(self, *what: object) -> object:
        if self._left <= 0:
            for _ in range(3):  # what was begun takes its first steps
                await asyncio.sleep(0)
            await self._die()
        return await self._keep_history(*what)  # type: ignore[arg-type]

    async def _die(self) -> None:
        self.is_dead = True
        await asyncio.Event().wait()


def counted(site: Site) -> Counter[str]:
    """How often each process is started, from now on."""
    started, command = Counter[str](), site.world._command

    def counts(job: Job, *where: Path) -> Sequence[str]:
        started[job.name] += 1
        return command(job, *where)

    site.world._command = counts
    return started


def is_whole(site: Site, rolling: RolloutController) -> bool:
    # A slot whose process has ended stays where the supervisor that was removing it died: nothing of it runs.
    state, slots = rolling.state, site.supervisor.slots.values()
    there = sum(slot.life.phase is not Phase.OVER for slot in slots)
    return state.phase is RolloutPhase.STEADY and len(state.replicas) == there == SIZE


@pytest.mark.parametrize("begins", [False, True], ids=["before anything is done", "when all is begun"])
async def test_it_goes_on_from_every_step(site: Site, begins: bool) -> None:
    """From one version to the next, and on, each time one step further, until a supervisor lives through it. The wanted
    two are there in the end and no others, each was started once, and there were never fewer ready than two, nor more
    than one beyond."""
    started = counted(site)
    async with site.carried_out() as rolling:
        await site.apply(text("0"))
        await site.in_place(rolling, 1)
    for step in count(1):
        site.ready_min, site.most = 99, 0
        died = await one_version_on(site, step, begins=begins)
        assert set(started.values()) == {1}, (step, started)
        assert len(started) == SIZE * (step + 1), (step, started)
        assert (site.ready_min, site.most <= SIZE + 1) == (SIZE, True), (step, site.told)
        if not died:
            break
        assert step < STEPS_MAX
    assert step > STEPS_MIN, "it was killed at steps that there are"


async def one_version_on(site: Site, step: int, *, begins: bool) -> bool:
    """Whether its supervisor died; another has brought it to its end then."""
    number = step + 1
    async with site.carried_out() as rolling:
        mortal = Mortal(rolling, step, begins=begins)
        await site.apply(text(str(step)))

        def is_over() -> bool:
            return mortal.is_dead or (rolling.state.target.number == number and is_whole(site, rolling))

        await site.until(is_over, f"step {step}")
    if mortal.is_dead:
        async with site.carried_out() as rolling:
            await site.in_place(rolling, number)
            await site.until(lambda: is_whole(site, rolling), "the last one to be gone")
            assert len(site.ready) == SIZE
    return mortal.is_dead
