"""The dispatcher against everything workers, clients and time can do, in any order.

The model knows the engine: the next token of a stream is a function of its tokens so far, so every stream's tokens
must at every moment be a prefix of the one unbroken run, whatever happened to it.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.core.errors import RESUMABLE, Code
from holdfast.core.tiers import Tier
from holdfast.health.standing import EJECTED, HealthStatus
from holdfast.routing.degradation import RULES
from holdfast.routing.table import PriorityClass
from holdfast.spec.waits import HoldSettings
from holdfast.wire.messages import Generate
from tests.rigs.worlds.streams import Client, Cluster, Worker

TOKENS_MAX = 6
PICK = st.integers(0, 10_000)
RESUMED_CODES = st.sampled_from(sorted(RESUMABLE - {Code.WORKER_OVERLOADED}))


def next_token(tokens: list[int]) -> int:
    return (tokens[-1] * 31 + len(tokens) * 7) % 997


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(HoldSettings(hold_s=5.0, queue_s=1.0, fresh_max=3, stand_in_after_s=60.0))
        self.names = itertools.count(1)
        self.left: set[str] = set()
        self.epoch = 0

    # -- pieces

    def living(self) -> list[Worker]:
        return [worker for worker in self.cluster.workers.values() if worker.link.workers is not None]

    def running(self) -> list[tuple[Worker, Client]]:
        return [
            (worker, flight.consumer)
            for worker in self.living()
            for flight in worker.link.streams.values()
            if isinstance(flight.consumer, Client)
        ]

    # -- what happens

    @precondition(lambda self: len(self.living()) < 3)
    @rule(places=st.integers(1, 3), standby=st.booleans())
    def worker_of_a_group_comes(self, places: int, standby: bool) -> None:
        self.epoch += 1
        says = {"active": not standby, "epoch": 0 if standby else self.epoch}
        self.cluster.worker(f"w{next(self.names)}", places, group="g", **says)

    @precondition(lambda self: len(self.living()) < 3)
    @rule(places=st.integers(1, 3))
    def worker_comes(self, places: int) -> None:
        self.cluster.worker(f"w{next(self.names)}", places)

    @precondition(lambda self: any(w.link.workers is None for w in self.cluster.workers.values()))
    @rule(pick=PICK)
    def worker_reconnects(self, pick: int) -> None:
        gone = [worker for worker in self.cluster.workers.values() if worker.link.workers is None]
        gone[pick % len(gone)].connect()

    @rule(level=st.integers(0, 4))
    def level_changes(self, level: int) -> None:
        """Those that wait hear of it with the next tick."""
        self.cluster.directory.degrade("d", RULES[level])
        self.cluster.wait(0.1)

    @rule(long=st.booleans(), tier=st.sampled_from(Tier))
    def ask(self, long: bool, tier: Tier) -> None:
        name = f"s{next(self.names)}"
        self.cluster.ask(name, list(range(1, 130 if long else 4)), TOKENS_MAX, tier=tier)

    @precondition(lambda self: self.running())
    @rule(pick=PICK, count=st.integers(1, 3))
    def tokens_come(self, pick: int, count: int) -> None:
        worker, client = self.running()[pick % len(self.running())]
        request = next(r for r in reversed(worker.requests) if r.request_id == client.name)
        tokens = list(request.tokens) + client.shown[len(request.tokens) - request.prompt_len :]
        made: list[int] = []
        while len(made) < count and len(tokens) - request.prompt_len < TOKENS_MAX:
            made.append(next_token(tokens))
            tokens.append(made[-1])
        over = len(tokens) - request.prompt_len >= TOKENS_MAX
        worker.say(client.name, made, "length" if over else None)

    @precondition(lambda self: self.running())
    @rule(pick=PICK, code=RESUMED_CODES)
    def attempt_fails(self, pick: int, code: str) -> None:
        worker, client = self.running()[pick % len(self.running())]
        worker.say(client.name, [], fail=code)

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def request_is_turned_away(self, pick: int) -> None:
        """Other frontends have its places. Whoever ran nowhere yet has still not failed."""
        worker, client = self.running()[pick % len(self.running())]
        if client.flight.first_output:
            before = (client.ledger.resumed, client.ledger.empty_attempts, client.ledger.deaths)
            worker.turn_away(client.name)
            assert (client.ledger.resumed, client.ledger.empty_attempts, client.ledger.deaths) == before

    @precondition(lambda self: self.living())
    @rule(pick=PICK, places=st.integers(1, 3))
    def worker_has_room(self, pick: int, places: int) -> None:
        self.living()[pick % len(self.living())].room(places)

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def request_is_invalid(self, pick: int) -> None:
        worker, client = self.running()[pick % len(self.running())]
        worker.say(client.name, [], fail=Code.INVALID_REQUEST)

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def stream_is_closed(self, pick: int) -> None:
        worker, client = self.running()[pick % len(self.running())]
        worker.close_stream(client.name)

    @precondition(lambda self: self.living())
    @rule(pick=PICK, how=st.sampled_from(["die", "drain", "judged_lost"]))
    def worker_fails(self, pick: int, how: str) -> None:
        getattr(self.living()[pick % len(self.living())], how)()

    @precondition(lambda self: self.living())
    @rule(places=st.integers(1, 3))
    def engines_die_and_one_comes(self, places: int) -> None:
        """Twice in a row without a token makes suspects of all."""
        for worker in self.living():
            worker.die()
        self.worker_comes(places)

    @precondition(lambda self: self.living())
    @rule(pick=PICK, newer=st.sampled_from([-1, 1, 1]))
    def worker_takes_over(self, pick: int, newer: int) -> None:
        self.epoch += 1
        self.living()[pick % len(self.living())].take_over(self.epoch if newer > 0 else self.epoch - 2)

    @precondition(lambda self: self.living())
    @rule(pick=PICK, admit_max=st.sampled_from([None, 1]))
    def worker_is_judged_well(self, pick: int, admit_max: int | None) -> None:
        worker = self.living()[pick % len(self.living())]
        worker.route(routable=not worker.link.draining, admit_max=admit_max)

    @precondition(lambda self: self.living())
    @rule(pick=PICK, status=st.sampled_from(HealthStatus), spare=st.sampled_from([False, False, True]))
    def control_decides(self, pick: int, status: HealthStatus, spare: bool) -> None:
        """A verdict of any kind; what it takes from a worker costs no stream an attempt."""
        worker = self.living()[pick % len(self.living())]
        ledgers = {client.name: client.ledger for client in self.cluster.clients.values()}
        before = {name: (ledger.empty_attempts, ledger.deaths) for name, ledger in ledgers.items()}
        worker.judged(status, fall=worker.link.share.ejections + (status in EJECTED), spare=spare)
        for name, counts in before.items():
            ledger = self.cluster.clients[name].ledger
            after = (ledger.empty_attempts, ledger.deaths)
            assert all(now <= then for now, then in zip(after, counts, strict=True)), name

    @rule(pick=PICK, token=st.integers(0, 5))
    def an_old_attempt_speaks(self, pick: int, token: int) -> None:
        """Any worker says something wrong for any stream number it once had and no longer has."""
        old = [
            (worker, message)
            for worker in self.living()
            for message in worker.sent
            if isinstance(message, Generate) and message.stream not in worker.link.streams
        ]
        if old:
            worker, message = old[pick % len(old)]
            current = worker.numbers[message.request.request_id]
            worker.numbers[message.request.request_id] = message.stream
            worker.say(message.request.request_id, [token], "stop")
            worker.numbers[message.request.request_id] = current

    @precondition(lambda self: self.cluster.clients)
    @rule(pick=PICK)
    def client_leaves(self, pick: int) -> None:
        name = list(self.cluster.clients)[pick % len(self.cluster.clients)]
        self.left.add(name)
        self.cluster.leave(name)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.wait(seconds)

    # -- what must be true

    @invariant()
    def tokens_are_those_of_the_unbroken_run(self) -> None:
        for client in self.cluster.clients.values():
            ledger = client.ledger
            assert ledger.made == client.shown
            tokens = ledger.prompt + ledger.made
            for index in range(len(ledger.prompt), len(tokens)):
                assert tokens[index] == next_token(tokens[:index]), client.name

    @invariant()
    def each_stream_is_in_one_place(self) -> None:
        for client in self.cluster.clients.values():
            flight = client.flight
            on = [worker for worker in self.living() if flight in worker.link.streams.values()]
            held = flight in flight.workers.holds
            assert len(on) + held + client.ledger.ended == 1, client.name
            assert (flight.slot is not None) is bool(on)
            assert client.ends <= 1
            over = client.ledger.ended and client.name not in self.left
            assert client.ends == 1 or not over

    @invariant()
    def places_are_counted(self) -> None:
        for worker in self.cluster.workers.values():
            slot, streams = worker.link.slot, worker.link.streams
            assert slot.inflight == len(streams) <= worker.places
            unproven = [flight for flight in streams.values() if flight.first_output]
            assert slot.unproven == len(unproven)
            assert slot.trial is any(flight.priority is PriorityClass.ON_TRIAL for flight in unproven)
            assert slot.outstanding == sum(flight.cost for flight in streams.values())

    @invariant()
    def nobody_waits_for_a_free_place(self) -> None:
        for workers in self.cluster.directory.sets.values():
            apart = {held.item for held in workers.holds.held_for_group()}
            for held in workers.holds:
                priority = held.item.priority
                if held.item in apart:  # it waits for the standby of its group, where its KV is
                    awaits, links = held.item.awaits, self.cluster.dispatcher.links
                    assert priority is PriorityClass.RESUMED
                    assert awaits is not None
                    assert self.cluster.now_s < awaits.until_s
                    assert links.leader(awaits.group) is None
                    continue
                behind = priority is PriorityClass.FRESH and workers.holds.suspects
                assert behind or not workers.table.has_place(priority, limited=held.item.limited), held.item

    @invariant()
    def a_worker_that_was_full_gets_no_more_than_it_has_room_for(self) -> None:
        for worker in self.living():
            slot = worker.link.slot
            assert slot.room == 0 or not slot.in_line, "room is used or passed on in the same breath"

    @invariant()
    def full_workers_are_no_failures(self) -> None:
        assert Code.WORKER_OVERLOADED not in self.cluster.dispatcher.stats.resumed
        assert Code.WORKER_OVERLOADED not in self.cluster.dispatcher.stats.lost

    @invariant()
    def who_is_pushed_out_never_ran_and_left_a_full_line(self) -> None:
        for client in self.cluster.clients.values():
            if client.failure is not None and client.failure[0] is Code.PUSHED_OUT:
                assert not client.shown
                assert client.flight.priority is PriorityClass.FRESH
        assert Code.PUSHED_OUT not in self.cluster.dispatcher.stats.lost

    @invariant()
    def a_group_has_one_leader(self) -> None:
        serving = [worker.link for worker in self.living() if worker.link.slot.routable]
        assert all(link.active and not link.draining for link in serving)
        assert all(link.called_in or (link.share.weight > 0 and not link.share.spare) for link in serving)
        leaders = [link for link in serving if link.group == "g"]
        assert len(leaders) <= 1
        for worker in self.living():
            if self.cluster.dispatcher.links.superseded(worker.link).startswith("superseded"):
                assert not worker.link.streams

    @invariant()
    def a_suspect_is_tried_alone(self) -> None:
        for worker in self.living():
            if worker.link.slot.trial:
                assert worker.link.slot.unproven == 1


DispatcherMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDispatcherMachine = DispatcherMachine.TestCase
