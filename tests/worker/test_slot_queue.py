"""The line before a full worker: who gets the next place, and that nobody is forgotten."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.worker.slot_queue import KEEP_S, SlotQueue

PLACES = 8
WHO = st.sampled_from("ABCD")


class SharesMachine(RuleBasedStateMachine):
    """A worker of eight places and four frontends that do what the protocol lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_queue: SlotQueue[str] = SlotQueue()
        self.streams = dict.fromkeys("ABCD", 0)
        self.room = dict.fromkeys("ABCD", 0)  # what each has been offered and not answered
        self.leaves = dict.fromkeys("ABCD", 0)  # what was left free by the request each was turned away with
        self.kept_for = dict.fromkeys("ABCD", 0)  # and that, when it was offered what it has
        self.until_s = dict.fromkeys("ABCD", 0.0)  # when that is given up
        self.turned_away: set[str] = set()  # and has not passed since: it sends nothing before it hears of room
        self.silent: set[str] = set()  # was too slow for its last offer, and has said nothing since
        self.now_s = 0.0

    @property
    def free(self) -> int:
        return PLACES - sum(self.streams.values())

    def offer(self) -> None:
        for who, places in self.slot_queue.offer(self.free, self.streams.__getitem__, self.now_s).items():
            assert places > 0
            assert self.room[who] == 0
            assert who not in self.silent, "a frozen one would hold a place again and again"
            self.room[who], self.kept_for[who] = places, self.leaves[who]
            self.until_s[who] = self.now_s + KEEP_S

    @rule(who=WHO, leaves=st.sampled_from([0, 0, 2, 6]))
    def ask(self, who: str, leaves: int) -> None:
        """For a request that may have every place, or leaves some to others."""
        rest = self.slot_queue.kept - (
            self.room[who] > 0
        )  # what is kept for itself is kept too, but for the one it uses
        promised = self.room[who] > 0 and leaves <= self.kept_for[who]
        taken = self.slot_queue.admit(who, self.free, leaves)
        self.silent.discard(who)
        assert taken is (self.free - (0 if promised else leaves) > rest)
        assert taken or not promised, "what is kept for one is kept"
        self.room[who] = max(0, self.room[who] - 1)
        if taken:
            self.streams[who] += 1
        else:
            self.slot_queue.turn_away(who, leaves)
            self.leaves[who] = leaves
            self.turned_away.add(who)
        self.offer()

    @rule(who=WHO)
    def end(self, who: str) -> None:
        self.streams[who] = max(0, self.streams[who] - 1)
        self.offer()

    @rule(who=WHO)
    def leave(self, who: str) -> None:
        self.slot_queue.leave(who)
        self.room[who] = 0
        self.turned_away.discard(who)
        self.silent.discard(who)
        self.offer()

    @rule(who=WHO)
    def decline(self, who: str) -> None:
        self.slot_queue.decline(who)
        self.room[who] = 0
        self.silent.discard(who)
        self.offer()

    @rule(who=WHO)
    def give_up(self, who: str) -> None:
        """A request that was turned away, or ended."""
        self.slot_queue.forget_bound(who)
        self.leaves[who] = 0
        self.offer()

    @rule(seconds=st.sampled_from([0.1, KEEP_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for who, until_s in self.until_s.items():
            if self.room[who] and until_s <= self.now_s:
                self.room[who] = 0  # it was too slow
                self.silent.add(who)
        self.offer()

    @invariant()
    def kept_places_are_free_places(self) -> None:
        assert self.slot_queue.kept == sum(self.room.values())
        assert 0 <= self.slot_queue.kept <= self.free

    @invariant()
    def nobody_stands_in_line_before_a_free_place(self) -> None:
        waiting = [who for who in self.turned_away - self.silent if not self.room[who]]
        assert all(self.free - self.slot_queue.kept <= self.leaves[who] for who in waiting)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert {who for who in "ABCD" if who in self.slot_queue} == self.turned_away

    @invariant()
    def what_is_kept_is_given_up_in_time(self) -> None:
        at_s = self.slot_queue.given_up_at_s
        assert (at_s is None) is (self.slot_queue.kept == 0)
        assert at_s is None or self.now_s < at_s <= self.now_s + KEEP_S


SharesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharesMachine = SharesMachine.TestCase


def test_what_is_kept_for_a_frontend_is_not_for_its_requests_that_leave_places() -> None:
    """It was turned away with one that may have every place: two that leave two free do not have them, neither the
    first nor, because that was turned away, the next."""
    slot_queue: SlotQueue[str] = SlotQueue()
    slot_queue.turn_away("A")
    assert slot_queue.offer(3, lambda who: 5, 0.0) == {"A": 3}
    for _ in range(2):
        assert not slot_queue.admit("A", 3, leaves=2)
        slot_queue.turn_away("A", leaves=2)
    assert slot_queue.kept == 1
    assert slot_queue.admit("A", 3)


def served(demand: dict[str, int], rounds: int, life: int) -> dict[str, int]:
    """A worker of eight places whose streams live for `life` rounds; each frontend always has so many requests."""
    slot_queue: SlotQueue[str] = SlotQueue()
    streams: dict[str, list[int]] = {who: [] for who in demand}
    done = dict.fromkeys(demand, 0)

    def free() -> int:
        return PLACES - sum(map(len, streams.values()))

    def ask(who: str, now: int) -> bool:
        if slot_queue.admit(who, free()):
            streams[who].append(now + life)
            return True
        slot_queue.turn_away(who)
        return False

    for now in range(rounds):
        for who, ends in streams.items():
            done[who] += sum(end <= now for end in ends)
            streams[who] = [end for end in ends if end > now]
        for who, places in slot_queue.offer(free(), lambda who: len(streams[who]), now * 0.01).items():
            wanted = min(places, demand[who] - len(streams[who]))
            assert all(ask(who, now) for _ in range(wanted))
            if wanted < places:
                slot_queue.leave(who)
        for who, wanted in demand.items():
            while len(streams[who]) < wanted and who not in slot_queue and ask(who, now):
                pass
    return done


def test_who_wants_much_gets_the_same_as_others_who_do() -> None:
    """Whatever the proportion of their demands, and whoever came first."""
    for first, second in itertools.permutations((8, 80, 800), 2):
        done = served({"A": first, "B": second}, rounds=2000, life=10)
        assert max(done.values()) <= 1.1 * min(done.values()), done


def test_who_wants_little_gets_all_of_it() -> None:
    """Two places of eight are less than a half: it is served as if it were alone, and the others have the rest."""
    done = served({"A": 800, "B": 2}, rounds=2000, life=10)
    alone = served({"B": 2}, rounds=2000, life=10)
    assert done["B"] >= 0.75 * alone["B"], (done, alone)
    assert done["A"] + done["B"] >= 0.95 * sum(served({"A": 800}, rounds=2000, life=10).values())
