"""Stories of streams that change hands: `> command` lines are what happens, the rest is what came of it.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.tiers import parse_tier
from holdfast.discovery.keys import CONTROLS, LOADINGS, LoadingRecord
from holdfast.health.records import ControlRecord
from holdfast.health.standing import HealthStatus
from holdfast.spec.waits import HoldSettings
from holdfast.store.contract import Deleted, Put
from holdfast.streams.flight import WorkerSet
from tests.rigs.transcripts import must_go_as_written, stories
from tests.rigs.worlds.streams import Cluster, make_card


class Story:
    """Plays commands against a cluster, on time it makes up itself."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.began_s = self.cluster.now_s
        self.sets: dict[str, WorkerSet] = {}

    def play(self, command: str) -> list[str]:
        cluster = self.cluster
        cluster.events = []
        words = [word for word in command.split() if "=" not in word]
        values = {key: value for key, _, value in (word.partition("=") for word in command.split() if "=" in word)}
        if words[0] in cluster.workers:
            getattr(self, f"worker_{words[1]}")(words[0], words[2:], values)
        else:
            getattr(self, f"do_{words[0]}")(words[1:], values)
        return [f"    {event}" for event in cluster.events]

    # -- the world

    def do_holds(self, words: list[str], values: dict[str, str]) -> None:
        """Settings of the hold; first in a story."""
        given: dict[str, Any] = {key: float(value) for key, value in values.items()}
        self.cluster = Cluster(HoldSettings(**given))

    def do_set(self, words: list[str], values: dict[str, str]) -> None:
        """A worker set: `weights=`, `tokenizer=`, `template=`."""
        card = make_card(
            values.get("weights", "r1"),
            tokenizer_sha256=values.get("tokenizer", "t1"),
            chat_template=values.get("template", "plain"),
        )
        self.sets[words[0]] = self.cluster.set(card)

    def do_worker(self, words: list[str], values: dict[str, str]) -> None:
        """`worker a` takes work; `worker a standby` does not yet; both may have `group=` and `epoch=`."""
        says = {"active": words[1:] != ["standby"], "epoch": int(values.get("epoch", "0"))}
        places, workers = int(values.get("places", "8")), self.sets.get(values.get("set", ""))
        self.cluster.worker(words[0], places, workers, group=values.get("group", ""), **says)

    def do_ask(self, words: list[str], values: dict[str, str]) -> None:
        stop = int(values["stop"]) if "stop" in values else None
        workers = self.sets.get(values.get("set", ""))
        tokens = [int(token) for token in words[1:]]
        tier = parse_tier(values.get("tier", "standard"))
        self.cluster.ask(words[0], tokens or None, int(values.get("max", "100")), stop, workers, tier)

    def do_leave(self, words: list[str], values: dict[str, str]) -> None:
        self.cluster.leave(words[0])

    def do_wait(self, words: list[str], values: dict[str, str]) -> None:
        self.cluster.wait(float(words[0]))

    def do_control(self, words: list[str], values: dict[str, str]) -> None:
        """`control leads`, or `control gone`."""
        key = f"{CONTROLS}d/control"
        record = msgspec.json.encode(ControlRecord(name="control", leads=True))
        self.cluster.hear(CONTROLS, Put(key, record) if words == ["leads"] else Deleted(key))

    def do_loading(self, words: list[str], values: dict[str, str]) -> None:
        """`loading 9 within=60`: the engine of instance 9 says that it is; `loading 9 over`: it says so no more."""
        workers = self.cluster.set()
        path = f"{LOADINGS}{workers.namespace}/worker/generate/{words[0]}"
        if words[1:] == ["over"]:
            self.cluster.loadings.on_store_event(Deleted(path))
        else:
            record = LoadingRecord(f"engine-{words[0]}", workers.checksum, float(values["within"]))
            self.cluster.loadings.on_store_event(Put(path, msgspec.json.encode(record)))

    def do_store(self, words: list[str], values: dict[str, str]) -> None:
        """`store lost`, or `store back`."""
        self.cluster.directory.store_lost = words == ["lost"]

    def do_remind(self, words: list[str], values: dict[str, str]) -> None:
        self.cluster.dispatcher.remind_waiting()

    def do_status(self, words: list[str], values: dict[str, str]) -> None:
        cluster = self.cluster
        cluster.tell(f"at {cluster.now_s - self.began_s:.1f} s")
        for name, client in cluster.clients.items():
            flight, ledger = client.flight, client.ledger
            running = next((w.name for w in cluster.workers.values() if flight.slot is w.link.slot), "")
            place = f"on {running}" if running else "held" if flight in flight.workers.holds else "over"
            exact = f"inexact: {ledger.inexact_reason}" if ledger.inexact_reason else "exact"
            cluster.tell(f"{name}: {place}, {ledger.emitted} tokens, resumed {ledger.resumed}, {exact}")

    def do_workers(self, words: list[str], values: dict[str, str]) -> None:
        """Who gets work, and why not."""
        for name, worker in self.cluster.workers.items():
            link = worker.link
            why = "not connected" if link.workers is None else self.cluster.dispatcher.links.objection(link)
            trial = ", on trial" if link.slot.trial else ""
            weight = "" if link.share.weight == 1.0 else f", weight {link.share.weight:g}"
            self.cluster.tell(f"{name}: {why or 'serves'}, {len(link.streams)} streams{weight}{trial}")

    # -- what workers do

    def worker_says(self, name: str, words: list[str], values: dict[str, str]) -> None:
        tokens = [int(token) for token in words[1:]]
        self.cluster.workers[name].say(words[0], tokens, values.get("finish"), values.get("fail"))

    def worker_has(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """`has room 2`: it was full, and keeps so many places for us."""
        self.cluster.workers[name].room(int(words[1]))

    def worker_doubts(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """`doubts itself epoch=2`: it leads, and says that its answers may be wrong."""
        self.cluster.workers[name].take_over(int(values["epoch"]), "its proof failed twice")

    def worker_leads(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.cluster.workers[name].take_over(int(values["epoch"]))

    def worker_dies(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.cluster.workers[name].die()

    def worker_returns(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.cluster.workers[name].connect()

    def worker_closes(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.cluster.workers[name].close_stream(words[0])

    def worker_drains(self, name: str, words: list[str], values: dict[str, str]) -> None:
        self.cluster.workers[name].drain()

    def worker_stops(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """It is judged stopped: its connection stands, its streams move."""
        self.cluster.workers[name].judged_lost()

    def worker_is(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """`is UNHEALTHY fall=1 why=stopped`, or `is HEALTHY spare`: as control decided."""
        why, fall = values.get("why", "as decided"), int(values.get("fall", "0"))
        self.cluster.workers[name].judged(HealthStatus[words[0]], fall=fall, why=why, spare=words[1:] == ["spare"])

    def worker_on(self, name: str, words: list[str], values: dict[str, str]) -> None:
        """`on probation`, admitting two; `on trust`, admitting all."""
        self.cluster.workers[name].route(routable=True, admit_max=2 if words == ["probation"] else None)


@stories("streams", least=14)
def test_the_stream_story_goes_as_written(path: Path) -> None:
    """Every transcript's outcomes are exactly those of today's dispatcher."""
    must_go_as_written(path, Story)
