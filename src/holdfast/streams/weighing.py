"""Gives each worker what control's verdict leaves it: weights, streams that must leave, streams that leave by plan.

A fall moves a worker's streams at once: they are resumed elsewhere, or held, and nothing of that is held against the
stream or, here, against the worker. One that drains keeps its streams until others have places for them: a few go at a
time, and the next when those have made a token there, so that whoever takes them is not swamped.

Always true: no verdict is waited for by what takes over (`streams.standings`); nobody is handed over who would have to
wait, or ahead of those who do; a spare serves only while nobody else of its set can, and so does one that is replaced,
but only what had begun in its set: it died with its last streams, say, and is back. A worker in doubt does so too,
where the last verdicts leave its set with none (`health.last_resort`); and a fall moves no stream before another worker
of the set can take it, unless its own worker cannot go on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping

from holdfast.core.errors import Code
from holdfast.discovery.keys import InstanceKey
from holdfast.health.last_resort import SPARE, Member, kept
from holdfast.store.contract import WatchEvent
from holdfast.streams.dispatcher import MAY_BE_WRONG, Dispatcher
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.link import WorkerLink
from holdfast.streams.standings import Standings, idle

log = logging.getLogger("holdfast.workers")

# Each costs a prefill where it goes, beside the work there.
HANDED_OVER_AT_ONCE = 4
# Workers in doubt serve once their set has had none for so long: control says it sooner where it is there, and a
# standby that is about to take over has done so. Much shorter than streams are held (`HoldSettings.hold_s`, 30 s).
LAST_RESORT_AFTER_S = 5.0
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
                if heard.fell:
                    link.postponed = heard.fell
                    self._call(link.workers)  # a spare comes before a wait
                    self._move(link)

    def _move(self, link: WorkerLink) -> None:
        """Move the streams of a worker that fell, if another can take them or it cannot go on with them."""
        if link.share.weight > 0.0:
            link.postponed = ""  # it is back
            return
        workers = link.workers
        others = workers.table.routable_count - link.slot.routable if workers is not None else 0
        if not others and self._can_serve(link):
            return
        why, link.postponed = link.postponed, ""
        if link.streams:
            log.info("%s: its %d streams are moved: %s", link.instance.name, len(link.streams), why)
            link.fail_streams(Code.RESPONSE_TIMEOUT, why, tell_worker=True, faulty=False)

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
        for flight in link.streams.values() if share.wrong and not before.wrong else ():
            flight.ledger.doubt(MAY_BE_WRONG)
        if (share.weight, share.status) != (before.weight, before.status):
            log.info("%s: weight %g: %s", link.instance.name, share.weight, share.reason or "nothing speaks against it")
        self._dispatcher.reroute(link)

    def tick(self) -> None:
        """Ten times a second: who waited long enough is let in, who drains gives some away, spares are called."""
        links = self._all()
        for link in links:
            if link.share.until_s is not None:
                self.weigh(link)
        for workers in {link.workers for link in links if link.called or link.share.objection}:
            self._call(workers)
        for link in links:
            if link.postponed:
                self._move(link)
            if link.share.drains and link.streams and not link.called:
                self._hand_over(link)
            if link.share.idle:
                self._bring_home(link)

    def _call(self, workers: WorkerSet | None) -> None:
        """Let a spare serve where no other worker of the set does (control may be away, or has not seen it yet), and
        after a while the least doubtful of the others: verdicts alone must not leave a set without a worker."""
        if workers is None:
            return
        links = [link for link in self._all() if link.workers is workers]
        called: set[WorkerLink] = set()
        if not any(link.slot.routable and not link.called for link in links):
            empty_s = self._clock() - workers.empty_since_s if workers.empty_since_s else 0.0
            able = [link for link in links if self._can_serve(link)]
            stay = empty_s >= LAST_RESORT_AFTER_S or any(link.called for link in able)
            called = kept(Member(link, 0.0, link.share.doubt) for link in able if stay or link.share.doubt == SPARE)
        for link in links:
            if (link in called) is not link.called:
                link.called = not link.called
                what = "a spare" if link.share.spare else f"in doubt ({link.share.objection})"
                then = "serves, because no other does" if link.called else "is needed no more"
                log.info("%s: %s, %s", link.instance.name, what, then)
                self._dispatcher.reroute(link)

    def _can_serve(self, link: WorkerLink) -> bool:
        """Whether only control's verdict keeps a worker from serving."""
        share, up = link.share, link.data is not None and link.active and link.trusted and not link.draining
        waits = share.idle or share.until_s is not None or not share.objection
        return up and not waits and share.doubt is not None and not self._dispatcher.links.superseded(link)

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
