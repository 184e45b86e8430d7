"""Gives each worker what control's verdict leaves it: weights, streams that must leave, streams that leave by plan.

A fall moves a worker's streams at once: they are resumed elsewhere, or held, and nothing of that is held against the
stream or, here, against the worker. One that drains keeps its streams until others have places for them: a few go at a
time, and the next when those have made a token there, so that whoever takes them is not swamped.

Always true: no verdict is waited for by what takes over (`streams.standings`); nobody is handed over who would have to
wait, or ahead of those who do; a spare serves only while nobody else of its set can, and so does one that is replaced,
but only what had begun in its set: it died with its last streams, say, and is back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping

from holdfast.core.errors import Code
from holdfast.discovery.keys import InstanceKey
from holdfast.store.contract import WatchEvent
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.flight import Flight
from holdfast.streams.link import WorkerLink
from holdfast.streams.standings import Standings, idle

log = logging.getLogger("holdfast.workers")

# Each costs a prefill where it goes, beside the work there.
HANDED_OVER_AT_ONCE = 4
_ENGINE = re.compile(r"-engine-\d+$")  # of a pod that has several, behind its name

Links = Mapping[InstanceKey, list[WorkerLink]]


class Weighing:
    """Weighs the links of one frontend."""

    def __init__(self, dispatcher: Dispatcher, links: Links, standings: Standings, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._links = links
        self._standings = standings
        self._clock = clock
        self._idle: dict[str, dict[str, frozenset[str]]] = {}  # by deployment, and by who says so
        self._under_way: set[Flight] = set()  # handed over, and without a token since

    def hear(self, prefix: str, event: WatchEvent) -> None:
        """What the store says under HEALTH or CONTROLS."""
        for heard in self._standings.hear(prefix, event):
            links = self._all() if heard.key is None else list(self._links.get(heard.key, ()))
            for link in links:
                self.weigh(link)  # first: what must leave is not to come back
                if heard.fell and link.streams:
                    log.info("%s: its %d streams are moved: %s", link.instance.name, len(link.streams), heard.fell)
                    link.fail_streams(Code.RESPONSE_TIMEOUT, heard.fell, tell_worker=True, faulty=False)

    def idle(self, deployment: str, names: Collection[str], by: str = "rollout") -> None:
        """Replicas that a deployment's rollout, or its fleet, gives no work, by their pods' names: all that it has a
        word to say of, each time."""
        said = self._idle.setdefault(deployment, {})
        if said.get(by, frozenset()) == frozenset(names):
            return
        said[by] = frozenset(names)
        for link in self._all():
            self.weigh(link)

    def weigh(self, link: WorkerLink) -> None:
        """Look up what it gets now, and route by it."""
        key, trusted = link.instance.key, bool(link.group) or link.let_in
        alone = link.workers is not None and not link.workers.table.routable_count
        now_s = self._clock()
        share = self._standings.share(key, trusted=trusted, since_s=link.since_s, now_s=now_s, alone=alone)
        link.fit = share.weight > 0.0
        pod = _ENGINE.sub("", link.instance.name)
        whose = [by for by, names in self._idle.get(key.deployment, {}).items() if pod in names]
        if whose:
            share = idle(share, whose[0])
        before, link.share = link.share, share
        link.let_in |= share.weight > 0.0
        if share == before:
            return
        if (share.weight, share.status) != (before.weight, before.status):
            log.info("%s: weight %g: %s", link.instance.name, share.weight, share.reason or "nothing speaks against it")
        self._dispatcher.reroute(link)

    def tick(self) -> None:
        """Ten times a second: who waited long enough is let in, who drains gives some away, spares are called."""
        for link in self._all():
            if link.share.until_s is not None:
                self.weigh(link)
            if link.share.spare or link.called:
                self._call(link)
            if link.share.drains and link.streams:
                self._hand_over(link)
            if link.share.idle:
                self._bring_home(link)

    def _call(self, link: WorkerLink) -> None:
        """A spare serves where nobody else does: control may be away, or has not seen it yet."""
        workers = link.workers
        if workers is None:
            return
        spares = sum(1 for other in self._all() if other.called and other.workers is workers and other.slot.routable)
        called = link.share.spare and workers.table.routable_count <= spares
        if called is not link.called:
            link.called = called
            log.info("%s: a spare, %s", link.instance.name, "which serves, alone" if called else "needed no more")
            self._dispatcher.reroute(link)

    def _bring_home(self, link: WorkerLink) -> None:
        """Streams that had begun in its set and wait go to one that is replaced, where nobody else could take them."""
        workers, sound = link.workers, link.fit and link.trusted and link.active and not link.draining
        if workers is None or not sound or workers.table.routable_count or self._dispatcher.links.superseded(link):
            return
        self._dispatcher.workers_changed(workers, link.slot)

    def _hand_over(self, link: WorkerLink) -> None:
        self._under_way = {flight for flight in self._under_way if flight.first_output and not flight.ledger.ended}
        # Who came back (`Dispatcher.turned_away`) makes a token first.
        staying = [flight for flight in link.streams.values() if flight not in self._under_way]
        for flight in staying[: HANDED_OVER_AT_ONCE - len(self._under_way)]:
            if not self._dispatcher.hand_over(flight):
                return
            if flight.slot is not None:
                places = (self._dispatcher.links.place(slot) for slot in (link.slot, flight.slot))
                self._dispatcher.stats.handed_over(*places, replayed=flight.ledger.mark)
            self._under_way.add(flight)

    def _all(self) -> list[WorkerLink]:
        return [link for links in self._links.values() for link in links]
