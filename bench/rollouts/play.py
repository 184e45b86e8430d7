"""A scenario is played on its site: changed to and fro under load, watched, and hit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from bench import ROOT
from bench.rollouts.clients import Clients, alike, judge
from bench.rollouts.hits import Hit, Hitting
from bench.rollouts.looks import Looks
from bench.rollouts.scenario import Change, Scenario, missed_by
from bench.rollouts.shapes import DECODE, FRONTEND, PREFILL, WORKER, Shape
from bench.rollouts.site import Site
from holdfast.core.tasks import Tasks
from holdfast.rollout.machine import RolloutState
from holdfast.rollout.revision import Revision
from holdfast.testing.answers import Answer, difference
from holdfast.testing.workload import Workload

LOOK_S = 0.05


class Play:
    """`change` goes to the other shape, as often as one likes."""

    def __init__(self, site: Site, scenario: Scenario, seed: int = 1) -> None:
        self.site = site
        self.scenario = scenario
        load = Workload(scenario.streams, scenario.tokens, seed, scenario.before.model)
        self.clients = Clients(site.port, load, scenario.long_tokens)
        self._known: dict[str, list[Answer]] = {}  # the right answers of each shape, by its manifest
        self.at = scenario.before

    @classmethod
    @contextlib.asynccontextmanager
    async def begun(cls, scenario: Scenario, seed: int = 1) -> AsyncIterator[Play]:
        """On a site of its own, its first revision in place and its answers known."""
        with Site(scenario.gpus) as site:
            async with site.kept(scenario.before):
                play = cls(site, scenario, seed)
                number = await site.apply(scenario.before)
                await site.settled(number, scenario.before)
                await play._learn(scenario.before)
                yield play

    @property
    def _differs(self) -> Callable[[Answer, Answer], str]:
        return difference if self.scenario.exact else alike

    def calm_pause_s(self) -> float:
        """The longest between two tokens while nothing was done to anybody."""
        return max(gap_s for answers in self._known.values() for one in answers for gap_s in one.gaps_s)

    async def _learn(self, shape: Shape) -> None:
        if shape.manifest() not in self._known:
            self.clients.model = shape.model
            self._known[shape.manifest()] = answers = await self.clients.once()
            bad = [answer.wrong for answer in answers if answer.wrong]
            assert not bad, f"an answer that nothing disturbs: {bad[:3]}"

    async def change(self, hit: Hit | None = None, dies_at: int = 0) -> Change:
        """To the other shape, under load; what was found. `dies_at`: the supervisor ends by itself after that many
        memories that it wrote, and is followed by another."""
        site = self.site
        old, new = self.at, self.scenario.after if self.at == self.scenario.before else self.scenario.before
        services = (DECODE, PREFILL) if new.split else (WORKER,)
        if dies_at:
            site.kill_keeper()
            site.keep(new, dies_at)
        looks, hitting = Looks(site, services), Hitting(site, new, hit)
        said, since, self.clients.asked, lives = len(site.said()), len(site.memories), [], site.lives
        async with self._watched(looks, hitting, new) as beside_it, self.clients.all_the_time():
            began_s = time.monotonic()
            number = await site.apply(new)
            await site.settled(number, new)
            took_s = time.monotonic() - began_s
            for task in beside_it:
                if task.done():
                    task.result()
        looks.leave_out(hitting.cuts)
        if site.state.undone != number:
            self.at = new
        await self._learn(self.at)
        floor, most = _sizes(min, old, new, services), _sizes(max, old, new, services)
        memories = [memory for _, memory in site.memories[since:]]
        return Change(
            hit=f"{hit}: {hitting.done or 'nothing was there'}" if hit is not None else "",
            victim=hit.victim if hit is not None and hitting.done else None,
            killed=hitting.done,
            found=judge(self.clients.asked, list(self._known.values()), hitting.cuts, self._differs),
            took_s=took_s,
            steps=hitting.steps,
            floor=floor,
            least={service: looks.least(service) for service in floor},
            surge={service: looks.most(service) - most[service] for service in floor},
            said=[line for line in site.said()[said:] if "revision" in line],
            undone=site.state.why.replace(f"{ROOT}/", "") if site.state.undone == number else "",
            twice=[f"{name}: {sorted(pids)}" for name, pids in looks.pids.items() if len(pids) > 1],
            across=across(memories),
            attempts=looks.attempts(new_sets(memories, number)),
            both_names=old.model == new.model or {old.model, new.model} <= looks.models,
            dead=site.lives - lives,
            nobody_s={service: looks.nobody_s(service) for service in services},
            held_s={service: one.longest_s for service, one in site.state.downtimes.items()},
        )

    @contextlib.asynccontextmanager
    async def _watched(self, looks: Looks, hitting: Hitting, new: Shape) -> AsyncIterator[list[asyncio.Task[None]]]:
        tasks = Tasks("watching")
        works = {"looks": looks.run(), "hits": hitting.run(), "supervisor": self._keep(new), "names": self._rename(new)}
        try:
            yield [tasks.spawn(work, name) for name, work in works.items()]
        finally:
            await tasks.stop()

    async def _keep(self, shape: Shape) -> None:
        """A supervisor that died by itself is followed by another."""
        while True:
            if not self.site.is_kept:
                self.site.keep(shape)
            await asyncio.sleep(LOOK_S)

    async def _rename(self, new: Shape) -> None:
        """Clients ask for the new name as soon as it is served."""
        while self.clients.model != new.model:
            pages = await self.site.frontends()
            if pages and all(new.model in page["models"] for page in pages.values()):
                self.clients.model = new.model
            await asyncio.sleep(LOOK_S)

    def missed(self, change: Change) -> list[str]:
        return missed_by(change, self.scenario, self.scenario.after.deadline_s)


def _sizes(pick: Callable[[int, int], int], old: Shape, new: Shape, services: tuple[str, ...]) -> dict[str, int]:
    workers = dict.fromkeys(services, pick(old.workers, new.workers))
    return workers | {FRONTEND: pick(old.frontends, new.frontends)}


def across(memories: list[RolloutState]) -> list[str]:
    """Pairs of sets that some replica was to work in, and no revision has."""
    known: list[Revision] = []
    for memory in memories:
        known += [one for one in (memory.target, memory.stable) if one is not None and one not in known]
    pairs = {revision.pair(service) for revision in known for service in revision.parts}
    found = {one.pair for memory in memories for one in memory.replicas.values()}
    return [str(pair) for pair in sorted(found - pairs)]


def new_sets(memories: list[RolloutState], number: int) -> set[str]:
    """Return the sets that the revision of that number brought."""
    for memory in memories:
        if memory.target.number == number:
            old = memory.stable.sets.values() if memory.stable is not None else ()
            return set(memory.target.sets.values()) - set(old)
    return set()
