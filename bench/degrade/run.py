"""`python -m bench.degrade`: workers are stopped until nothing is left and then go on, under load of every tier; which
levels followed, which tiers were refused at which, and how full the workers were.

What the workers carry is measured first, with every place taken, and a little less is promised (`room`), so that 90 %
of them are short of the promise whatever machine this is. Times of the levels are shorter than the defaults, so that it
takes minutes; bounds and rules are the defaults. A stopped worker costs no start, and is as lost as a killed one. At
the end one worker comes and goes by chance, so that capacity swings around a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from bench.degrade.story import Asked, Change, Look, Step, Story, step_row
from bench.degrade.telling import result_of
from holdfast.core.tasks import Tasks
from holdfast.core.tiers import Tier
from holdfast.discovery.keys import LEVELS
from holdfast.routing.degradation import LevelRecord, level_at
from holdfast.spec.health import DegradationSettings
from holdfast.store.contract import Put, Snapshot, Store
from holdfast.store.opening import open_store
from holdfast.testing.clients import Received, chat_body, open_client, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import get_json
from holdfast.testing.waiting import in_thread, until
from holdfast.wire.net import SocketNetwork

SHARES = (0.9, 0.7, 0.45, 0.2, 0.0)  # of the workers, one after the other; then all of them again
NOISY_SHARES = (0.8, 0.7)  # on both sides of a bound
AGAIN_S = 0.5  # a client that was refused asks again
LOOK_S = 0.25
# What is carried is the mean of several looks at it, once they differ by no more than this.
SETTLED, SETTLED_LOOKS, SETTLE_S = 0.025, 6, 1.5
# A promise holds if what is carried, measured again, is so near to what it was made of; busy machines need a few tries.
PROMISED, PROMISES_MAX = 0.015, 5
CROWD = 1.5  # clients for each place, while it is measured what all of them carry
START_S, LEVEL_S = 200.0, 120.0  # bounds: for the first checks, and for a level to follow
SWING_S = (0.5, 3.0)  # how long capacity stays on one side of a noisy bound

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DegradeBench:
    """What runs, and what is asked of it."""

    workers: int = 10  # 45 % of them are four; of 20 nine
    shares: tuple[float, ...] = SHARES
    places: int = 4
    # So slow that a busy machine is not what is measured: 200 tokens/s with ten workers. So long that what an answer
    # waits for its batch's next step is little of it.
    tokens: int = 30
    tpot_ms: float = 200.0
    room: float = 1.05  # what the workers carry, of what is promised
    stay_s: float = 14.0  # at each level: longer than an answer takes, so that batches are those of that level
    noise_s: float = 30.0
    seed: int = 1
    # Clients, of all places: premium within a fifth of full capacity, and all together more than there are.
    premium: float = 0.18
    standard: float = 0.5
    best_effort: float = 0.35

    def clients(self, tier: Tier) -> int:
        return max(1, int(getattr(self, tier.label) * self.workers * self.places))

    @property
    def times(self) -> DegradationSettings:
        return DegradationSettings(fall_s=1.0, fall_near_s=4.0, return_s=2.0, return_near_s=4.0, hold_s=6.0)

    def control(self, tokens_per_s: float) -> dict[str, Any]:
        slo = {"workers": self.workers, "tpot_ms": 4 * self.tpot_ms, "tokens_per_s": tokens_per_s}
        levels = {"slo": slo, "times": msgspec.to_builtins(self.times)}
        return {"health": {"canary_interval_s": 5.0, "canary_share": 1.0}, "levels": levels}

    def deployment(self) -> Deployment:
        sim = {"ttft_ms": 20.0, "tpot_ms": self.tpot_ms, "concurrency": self.places, "queue": 0}
        # A request that finds no place waits: so what is refused is refused by the level.
        frontend = {"holds": {"hold_s": self.times.hold_s, "queue_s": 30.0}}
        # Any promise: what is carried is measured all the same.
        return Deployment(self.workers, sim, frontend=frontend, control=self.control(1.0))


@dataclass(slots=True)
class Campaign:
    """The deployment, and all that is seen of it."""

    bench: DegradeBench
    deployment: Deployment
    tell: Tell
    story: Story
    tasks: Tasks = field(default_factory=lambda: Tasks("bench degrade"))

    # -- looking

    async def follow(self, store: Store) -> None:
        async for event in store.watch(LEVELS):
            if isinstance(event, Put):
                self._take(event.value)
            elif isinstance(event, Snapshot):
                for value in event.items.values():
                    self._take(value)

    def _take(self, value: bytes) -> None:
        record, changes = msgspec.json.decode(value, type=LevelRecord), self.story.changes
        if not changes or (changes[-1].level, changes[-1].record.vacant) != (record.level, record.vacant):
            self.tell(f"  level {record.level}: {record.reason}")
            changes.append(Change(time.perf_counter(), record))

    @property
    def level(self) -> int:
        return self.story.level_at(time.perf_counter())

    async def keep_looking(self) -> None:
        while True:
            page = await in_thread(self.deployment.health)
            if page and self.story.steps:
                running = set(self.deployment.worker_names[: self.story.steps[-1].workers])
                streams = tuple(one["streams"] for one in page["workers"] if one["name"] in running)
                self.story.looks.append(Look(time.perf_counter(), page["level"], streams, page["held"]))
            await asyncio.sleep(LOOK_S)

    # -- clients

    async def keep_asking(self, tier: Tier, number: int) -> None:
        bench = self.bench
        body = msgspec.json.encode(chat_body(f"{tier.label} {number}", bench.tokens, return_token_ids=True))
        await asyncio.sleep(random.Random(f"{bench.seed} {tier.label} {number}").random() * 2.0)
        while True:
            client = await open_client(self.deployment.port)
            try:
                received = await client.request("/v1/chat/completions", body, f"x-priority-tier: {tier.label}\r\n")
            finally:
                client.close()
            self.story.asked.append(asked_of(tier, received, bench.tokens))
            if received.status != 200:
                await asyncio.sleep(AGAIN_S)

    def ask_for(self, tier: Tier, clients: int) -> list[asyncio.Task[None]]:
        return [self.tasks.spawn(self.keep_asking(tier, number), "client") for number in range(clients)]

    # -- what is promised

    async def promise(self) -> None:
        """Measure what the workers carry, promise a little less, and wait until it is known under that promise too."""
        bench, promised = self.bench, 0.0
        crowd = self.ask_for(Tier.STANDARD, int(CROWD * bench.workers * bench.places))
        for _ in range(PROMISES_MAX):
            carried = await self.measured()
            if promised and abs(carried / promised - bench.room) <= PROMISED:
                break
            promised = carried / bench.room
            self.tell(f"{carried:.1f} tokens/s are carried, {promised:.1f} are promised")
            await in_thread(self.deployment.kill, "control")
            self.deployment.start_control(**bench.control(promised))
        for client in crowd:
            client.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        self.story.asked.clear()

    async def measured(self) -> float:
        """Tokens per second that all workers carry, once every one of them has shown it and it stays so."""
        looks: list[float] = []

        async def known() -> float:
            page = await in_thread(self._page)
            capacity = page.get("capacity") or {}
            ready = page.get("leads") and capacity.get("carriers") == self.bench.workers
            ready = ready and capacity.get("unmeasured") == 0
            self.tell(f"  measuring: {capacity.get('words', 'nothing is known yet')}")
            looks.append(float(capacity["tokens_per_s"]) if ready else 0.0)
            last = looks[-SETTLED_LOOKS:]
            settled = len(last) == SETTLED_LOOKS and min(last) > (1.0 - SETTLED) * max(last)
            return statistics.fmean(last) if settled else 0.0

        return float(await until(known, "what the workers carry", START_S, every_s=SETTLE_S))

    def _page(self) -> dict[str, Any]:
        status = self.deployment.record("control").get("status")
        return get_json(status, "/health") if status else {}

    # -- the story

    def leave(self, workers: int) -> None:
        """Let so many of them run."""
        for number, name in enumerate(self.deployment.worker_names):
            self.deployment.signal(name, signal.SIGCONT if number < workers else signal.SIGSTOP)

    async def step(self, share: float) -> None:
        """Let that share of the workers be there, until the level follows, and then for a while."""
        workers = round(share * self.bench.workers)
        step = Step(share, workers, level_at(share), time.perf_counter())
        self.story.steps.append(step)
        self.tell(f"{workers} of {self.bench.workers} workers: level {step.wanted} must follow")
        self.leave(workers)
        with contextlib.suppress(TimeoutError):
            await until(lambda: self.level == step.wanted, f"level {step.wanted}", LEVEL_S)
            step.followed_s = time.perf_counter()
        await asyncio.sleep(self.bench.stay_s + (0.0 if workers else self.bench.times.hold_s))
        step.ended_s = time.perf_counter()
        row = step_row(self.story, step)
        figures = ("level", "took_s", "batch", "batch_max", "finished", "refused")
        self.tell("  " + ", ".join(f"{name} {row[name]}" for name in figures))

    async def swing(self) -> None:
        """One worker comes and goes, so that capacity is now above a bound and now below it."""
        rng, (above, below) = random.Random(self.bench.seed), NOISY_SHARES
        until_s = (began_s := time.perf_counter()) + self.bench.noise_s
        self.tell(f"{above:.0%} or {below:.0%} of the workers by chance, for {self.bench.noise_s:g} s")
        while time.perf_counter() < until_s:
            for share in (above, below):
                self.leave(round(share * self.bench.workers))
                await asyncio.sleep(rng.uniform(*SWING_S))
        self.story.noise = (began_s, time.perf_counter())
        self.tell(f"  levels {[change.level for change in self.story.noisy()]}")

    async def run(self) -> None:
        bench = self.bench
        await self.promise()
        for tier in Tier:
            self.ask_for(tier, bench.clients(tier))
        self.tasks.spawn(self.keep_looking(), "looks")
        for share in (1.0, *bench.shares, 1.0):
            await self.step(share)
        if bench.noise_s:
            await self.swing()


def asked_of(tier: Tier, received: Received, tokens: int) -> Asked:
    """What one request came to."""
    now_s = time.perf_counter()
    first_s = received.pieces[0][0] if received.pieces else now_s
    if received.status == 200:
        answer = read_answer(received)
        whole = answer.done and len(answer.tokens) == tokens and not answer.wrong
        return Asked(tier, received.sent_s, first_s, now_s, 200, whole=whole)
    lines = received.head().lower().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("x-holdfast-reason:")]
    retry = any(line.startswith("retry-after:") for line in lines)
    return Asked(tier, received.sent_s, first_s, now_s, received.status, "".join(named[:1]), retry_after=retry)


def run(bench: DegradeBench, tell: Tell = lambda text: None) -> dict[str, Any]:
    """All of it; `missed` says what is not as it must be."""
    story = Story(bench.places, bench.clients(Tier.PREMIUM), bench.times)
    began_s = time.monotonic()
    with bench.deployment() as deployment:
        uvloop.run(_run(Campaign(bench, deployment, tell, story)))
    about: dict[str, Any] = {"workers": bench.workers, "places": bench.places, "seed": bench.seed}
    about |= {"clients": {tier.label: bench.clients(tier) for tier in Tier}}
    return result_of(story) | about | {"seconds": round(time.monotonic() - began_s, 1)}


async def _run(campaign: Campaign) -> None:
    store = open_store(campaign.deployment.store, SocketNetwork(), random.Random())
    await store.start()
    campaign.tasks.spawn(campaign.follow(store), "levels")
    try:
        await campaign.run()
    finally:
        campaign.leave(campaign.bench.workers)
        await campaign.tasks.stop()
        await store.close()
