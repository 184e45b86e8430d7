"""`holdfast bench degrade`: workers are stopped until nothing is left and then go on, under load of every tier; which
levels followed, and who was refused at which.

What the workers carry is measured first, at full load, and a little less is promised (`room`), so that 90 % of them are
short of the promise whatever machine this is. Times of the levels are shorter than the defaults, so that it takes
minutes; bounds and rules are the defaults. A stopped worker costs no start, and is as lost as a killed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from holdfast.core.tasks import Tasks
from holdfast.core.tiers import Tier
from holdfast.discovery.keys import LEVELS
from holdfast.routing.degradation import LEVEL_MAX, LevelRecord, level_at
from holdfast.store.contract import Put, Snapshot, Store
from holdfast.store.opening import open_store
from holdfast.testing.clients import Received, chat_body, open_client, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.place import get_json
from holdfast.testing.waiting import in_thread, until
from holdfast.wire.net import SocketNetwork

SHARES = (0.9, 0.7, 0.45, 0.2, 0.0)  # of the workers, one after the other; then all of them again
AGAIN_S = 0.5  # a client that was refused asks again
# A refusal that left a frontend as the level ended may arrive so much later.
LAG_S = 1.0
# What is carried is known when several looks at it differ by no more than this.
SETTLED, SETTLED_LOOKS, SETTLE_S = 0.02, 3, 4.0
START_S, LEVEL_S = 150.0, 45.0  # bounds: for the first checks, and for a level to follow


@dataclass(frozen=True, slots=True)
class DegradeBench:
    """What runs, and what is asked of it."""

    workers: int = 10  # 45 % of them are four; of 20 nine
    places: int = 4
    tokens: int = 10
    tpot_ms: float = 400.0  # so slow that a busy machine is not what is measured
    room: float = 1.03  # what the workers carry, of what is promised
    stay_s: float = 6.0  # at each level
    seed: int = 1
    # Clients, of all places: premium within a fifth of full capacity.
    premium: float = 0.18
    standard: float = 0.4
    best_effort: float = 0.3

    def clients(self, tier: Tier) -> int:
        return max(1, int(getattr(self, tier.word) * self.workers * self.places))

    @property
    def times(self) -> dict[str, float]:
        return {"fall_s": 1.0, "fall_near_s": 4.0, "return_s": 2.0, "return_near_s": 4.0, "hold_s": 6.0}

    def control(self, slo: dict[str, float]) -> dict[str, Any]:
        levels = {"slo": {"workers": self.workers, "tpot_ms": 4 * self.tpot_ms, **slo}, "times": self.times}
        return {"health": {"canary_interval_s": 5.0, "canary_share": 1.0}, "levels": levels}

    def deployment(self) -> Deployment:
        sim = {"ttft_ms": 20.0, "tpot_ms": self.tpot_ms, "concurrency": self.places, "queue": 2 * self.places}
        frontend = {"holds": {"hold_s": self.times["hold_s"]}}
        # Any promise: what is carried is measured all the same.
        return Deployment(self.workers, sim, frontend=frontend, control=self.control({"tokens_per_s": 1.0}))


@dataclass(slots=True)
class Seen:
    """What the clients of one tier saw."""

    finished: int = 0
    lost: int = 0
    refused: Counter[int] = field(default_factory=Counter)  # by the level that they may blame
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Campaign:
    """The deployment, its levels as they were written, and what clients see."""

    bench: DegradeBench
    deployment: Deployment
    tell: Callable[[str], None]
    levels: list[tuple[float, LevelRecord]] = field(default_factory=list)
    seen: dict[Tier, Seen] = field(default_factory=lambda: {tier: Seen() for tier in Tier})
    over: bool = False

    # -- levels

    async def follow(self, store: Store) -> None:
        async for event in store.watch(LEVELS):
            if isinstance(event, Put):
                self._take(event.value)
            elif isinstance(event, Snapshot):
                for value in event.items.values():
                    self._take(value)

    def _take(self, value: bytes) -> None:
        record = msgspec.json.decode(value, type=LevelRecord)
        if not self.levels or self.levels[-1][1].level != record.level:
            self.tell(f"level {record.level}: {record.reason}")
        self.levels.append((time.perf_counter(), record))

    @property
    def level(self) -> int:
        return self.levels[-1][1].level if self.levels else 0

    def worst_between(self, sent_s: float, answered_s: float) -> int:
        """The worst level in that time, which is what a refusal may blame."""
        before = [record.level for at_s, record in self.levels if at_s <= sent_s - LAG_S]
        during = [record.level for at_s, record in self.levels if sent_s - LAG_S < at_s <= answered_s + LAG_S]
        return max([*before[-1:], *during], default=0)

    # -- clients

    async def keep_asking(self, tier: Tier, number: int) -> None:
        body = json.dumps(chat_body(f"{tier.word} {number}", self.bench.tokens, return_token_ids=True)).encode()
        rng = random.Random(f"{self.bench.seed} {tier.word} {number}")
        await asyncio.sleep(rng.random() * 2.0)
        while not self.over:
            client = await open_client(self.deployment.port)
            try:
                received = await client.request(
                    "/v1/chat/completions", body, f"x-priority-tier: {tier.word}\r\n"
                )
            finally:
                client.close()
            self._judge(tier, received)
            if received.status != 200:
                await asyncio.sleep(AGAIN_S)

    def _judge(self, tier: Tier, received: Received) -> None:
        seen, now_s = self.seen[tier], time.perf_counter()
        if received.status == 200:
            answer = read_answer(received)
            whole = answer.done and len(answer.tokens) == self.bench.tokens and not answer.wrong
            seen.finished += whole
            seen.lost += not whole
            return
        seen.refused[self.worst_between(received.sent_s, now_s)] += 1
        named = [line for line in received.head().lower().splitlines() if line.startswith("x-holdfast-reason:")]
        seen.reasons[named[0].partition(":")[2].strip() if named else f"status {received.status}"] += 1

    # -- the story

    async def measured(self) -> float:
        """Tokens per second that all workers carry, once every one of them has shown it and it grows no more."""
        looks: list[float] = []

        async def known() -> float:
            capacity = (await in_thread(self._page)).get("capacity") or {}
            ready = capacity.get("carriers") == self.bench.workers and capacity.get("unmeasured") == 0
            self.tell(str(capacity.get("words", "no capacity is measured yet")))
            looks.append(float(capacity["tokens_per_s"]) if ready else 0.0)
            last = looks[-SETTLED_LOOKS:]
            return last[-1] if len(last) == SETTLED_LOOKS and min(last) > (1.0 - SETTLED) * max(last) else 0.0

        return float(await until(known, "what the workers carry", START_S, every_s=SETTLE_S))

    def _page(self) -> dict[str, Any]:
        status = self.deployment.record("control").get("status")
        return get_json(status, "/health") if status else {}

    async def promise(self, tokens_per_s: float) -> None:
        """Control goes on with another promise."""
        await in_thread(self.deployment.kill, "control")
        self.deployment.start_control(**self.bench.control({"tokens_per_s": tokens_per_s}))

        async def leads() -> bool:
            page = await in_thread(self._page)
            carriers = (page.get("capacity") or {}).get("carriers")
            return bool(page.get("leads")) and carriers == self.bench.workers

        await until(leads, "control to go on under that promise", START_S, every_s=0.2)

    async def leave(self, share: float) -> dict[str, Any]:
        """Let so many of the workers be there, until the level follows, and then for a while."""
        names, began_s = self.deployment.worker_names, time.perf_counter()
        for number, name in enumerate(names):
            runs = number < round(share * len(names))
            self.deployment.signal(name, signal.SIGCONT if runs else signal.SIGSTOP)
        wanted, first = level_at(share), len(self.levels)
        took_s: float | None = None
        with contextlib.suppress(TimeoutError):
            await until(lambda: self.level == wanted, f"level {wanted}", LEVEL_S)
            took_s = round(time.perf_counter() - began_s, 1)
        before = {tier: (self.seen[tier].finished, self.seen[tier].refused.total()) for tier in Tier}
        await asyncio.sleep(self.bench.stay_s if share else self.bench.times["hold_s"] + self.bench.stay_s)
        row: dict[str, Any] = {"share": share, "wanted": wanted, "level": self.level, "took_s": took_s}
        row["path"] = [record.level for _, record in self.levels[first:]]
        row["vacant"] = bool(self.levels) and self.levels[-1][1].vacant
        for tier in Tier:
            seen = self.seen[tier]
            row[f"{tier.word}_finished"] = seen.finished - before[tier][0]
            row[f"{tier.word}_refused"] = seen.refused.total() - before[tier][1]
        self.tell(f"{share:.0%} of the workers: {row}")
        return row


def run(bench: DegradeBench, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All of it; `missed` says what is not as it must be."""
    with bench.deployment() as deployment:
        return uvloop.run(_run(bench, deployment, tell))


async def _run(bench: DegradeBench, deployment: Deployment, tell: Callable[[str], None]) -> dict[str, Any]:
    campaign = Campaign(bench, deployment, tell)
    store = open_store(deployment.store, SocketNetwork(), random.Random())
    await store.start()
    tasks = Tasks("bench degrade")
    tasks.spawn(campaign.follow(store), "levels")
    try:
        extra = bench.workers * bench.places  # to fill every place while capacity is measured
        full = [tasks.spawn(campaign.keep_asking(Tier.STANDARD, number), "client") for number in range(extra)]
        carried = await campaign.measured()
        for client in full:
            client.cancel()
        campaign.seen = {tier: Seen() for tier in Tier}
        await campaign.promise(carried / bench.room)
        tell(f"{carried:.1f} tokens/s are carried, {carried / bench.room:.1f} promised")
        for tier in Tier:
            for number in range(bench.clients(tier)):
                tasks.spawn(campaign.keep_asking(tier, number), "client")
        rows = [await campaign.leave(share) for share in (1.0, *SHARES, 1.0)]
    finally:
        campaign.over = True
        for name in deployment.worker_names:
            deployment.signal(name, signal.SIGCONT)
        await tasks.stop()
        await store.close()
    return judge(bench, rows, campaign)


def judge(bench: DegradeBench, rows: list[dict[str, Any]], campaign: Campaign) -> dict[str, Any]:
    seen = campaign.seen
    early = sum(count for level, count in seen[Tier.PREMIUM].refused.items() if level < LEVEL_MAX)
    missed = [f"at {row['share']:.0%}: level {row['level']}, not {row['wanted']}" for row in rows if _is_other(row)]
    if early:
        missed.append(f"{early} premium requests were refused before level {LEVEL_MAX}")
    if not rows[-2]["vacant"]:
        missed.append("without any worker it was not called vacant")
    if refused := sum(rows[-1][f"{tier.word}_refused"] for tier in Tier):
        missed.append(f"{refused} were refused after all was back")
    return {
        "steps": rows,
        "levels": [record.level for _, record in campaign.levels],
        "premium_refused_early": early,
        **{f"{tier.word}_refused": {str(k): n for k, n in sorted(seen[tier].refused.items())} for tier in Tier},
        **{f"{tier.word}_reasons": dict(seen[tier].reasons) for tier in Tier},
        "finished": sum(one.finished for one in seen.values()),
        "lost": sum(one.lost for one in seen.values()),
        "missed": missed,
        "workers": bench.workers,
        "seed": bench.seed,
    }


def _is_other(row: dict[str, Any]) -> bool:
    """The level did not come, or did not stay."""
    return row["took_s"] is None or row["level"] != row["wanted"]
