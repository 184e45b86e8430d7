"""An upgrade on one device, with real processes: in place where its memory is for one, beside the old one where it is
for two. Streams run and requests come all the while."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from holdfast.core.tasks import beside
from holdfast.rollout.machine import DesiredState
from holdfast.rollout.revision import revision_of
from holdfast.spec.manifest.checking import check
from holdfast.supervise.device_places import device_claims
from holdfast.supervise.machine import Phase
from holdfast.testing.answers import Answer
from tests.rigs.roles.device_swap import FAST, LONG, ONE, SHORT, SLOW, TWO, fates, text_of, wants_of
from tests.rigs.roles.kept_manifest import Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(400)]
FAILOVER = pytest.mark.parametrize("failover", [True, False], ids=["pair", "alone"])
OTHER_CARD = f'{FAST}, --sim-context-tokens-max, "16384"'


class Device(Kept):
    """A machine with one device, on which streams are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0  # replicas whose memory was on the device at once
        self.late: list[Answer] = []

    async def watch(self) -> None:
        """Until cancelled: who is on the device, and short requests one after the other."""
        asked: asyncio.Future[Answer] | None = None
        while True:
            self.most = max(self.most, len(device_claims(slot.job for slot in self.supervisor.slots.values())))
            if asked is None or asked.done():
                if asked is not None:
                    self.late.append(asked.result())
                asked = asyncio.ensure_future(asyncio.to_thread(lambda: self.stream("late", 5).answer()))
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def busy(self, *lengths: int) -> AsyncIterator[list[Answer]]:
        """With streams of so many tokens under way; their answers, and others', are there in the end."""
        streams = [self.stream(f"story {number}", length) for number, length in enumerate(lengths)]
        for stream in streams:
            await asyncio.to_thread(stream.wait_tokens, 5)
        answers: list[Answer] = []
        async with beside(self.watch(), "watch"):
            yield answers
        answers += [await asyncio.to_thread(stream.answer) for stream in streams]
        self.report(answers)

    async def kill_again_and_again(self, name: str) -> None:
        """Until cancelled, whenever it is ready."""
        while True:
            slot = self.supervisor.slots.get(name)
            if slot is not None and slot.life.phase is Phase.READY:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot.life.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    def report(self, answers: list[Answer]) -> None:
        gaps = [max(answer.gaps_s, default=0.0) for answer in answers]
        print(f"longest pause of each stream: {[round(gap, 2) for gap in gaps]} s; {len(self.late)} asked meanwhile")
        print("\n".join(self.told))


@FAILOVER
async def test_memory_for_one_is_swapped_in_place(failover: bool) -> None:
    """At no time are two there. Who ends while the old one drains is exact; longer ones are held, and go on in the new
    one, whose card is the same, and say so; no request fails that comes meanwhile; how long nobody served is told."""
    first, second = (text_of(words, failover=failover) for words in (SLOW, FAST))
    with Device() as site:
        async with site.kept(first, **ONE) as rolling:
            await site.in_place(rolling, 1)
            async with site.busy(SHORT, LONG, SHORT, LONG) as answers:
                await site.apply(rolling, second)
                await site.in_place(rolling, 2)
            assert fates(answers) == [("", True), ("", False)] * 2, site.told
            assert fates(site.late) == [("", True)] * len(site.late), site.told
            assert site.most == 1
            assert rolling.state.downtimes["Worker"].longest_s > 0
            assert any("no Worker served for" in line for line in site.told), site.told


@FAILOVER
async def test_memory_for_two_is_a_standby_beside_the_old_one(failover: bool) -> None:
    """Both are on the one device until the new one has proved itself and the old one's streams have ended in it, all
    exact; then only the new one is."""
    first, second = (text_of(words, failover=failover) for words in (SLOW, FAST))
    with Device() as site:
        async with site.kept(first, **TWO) as rolling:
            await site.in_place(rolling, 1)
            old = set(site.workers())
            async with site.busy(SHORT, 10 * SHORT, SHORT, 10 * SHORT) as answers:
                await site.apply(rolling, second)
                await site.until(lambda: DesiredState.STAND_BY in wants_of(rolling.state), "one that stands by")
                await site.in_place(rolling, 2)
            assert fates(answers) == [("", True)] * 4, site.told
            assert fates(site.late) == [("", True)] * len(site.late), site.told
            assert site.most == 2
            assert not old & set(site.workers())
            taken = device_claims(slot.job for slot in site.supervisor.slots.values())
            assert [one.seat.device for one in taken] == ["host-1"]


@pytest.mark.parametrize("serves", [False, True], ids=["while it stands by", "once it serves"])
async def test_a_bad_one_beside_gives_way_to_the_old_one(serves: bool) -> None:
    """It dies again and again: the old one, which is the same process all the while, serves on or again, and its
    streams never knew."""
    first, second = (text_of(words, failover=False) for words in (SLOW, FAST))
    with Device() as site:
        async with site.kept(first, **TWO) as rolling:
            await site.in_place(rolling, 1)
            (old,) = site.workers()
            pid = site.supervisor.slots[old].life.pid
            stream = site.stream("story", 30 * SHORT)  # it keeps the old one from leaving too early
            await asyncio.to_thread(stream.wait_tokens, 5)
            await site.apply(rolling, second)
            await site.until(lambda: len(site.workers()) == 2, "the new one")
            (new,) = set(site.workers()) - {old}
            if serves:
                await site.until(
                    lambda: wants_of(rolling.state) == [DesiredState.DRAIN, DesiredState.SERVE], "its turn"
                )
            async with beside(site.kill_again_and_again(new), "kills"):
                await site.until(lambda: rolling.state.undone == 2, "it to be undone")
            await site.in_place(rolling, 1)
            assert (site.workers(), site.supervisor.slots[old].life.pid) == ([old], pid), site.told
            answer, again = await asyncio.to_thread(stream.answer), site.stream("again", 5)
            assert fates([answer, await asyncio.to_thread(again.answer)]) == [("", True)] * 2, site.told


@FAILOVER
async def test_a_bad_one_in_place_gives_the_place_back(failover: bool) -> None:
    """It cannot load: another of the old set starts in the old one's place, and the streams that were held go on there,
    in their own set, exactly."""
    broken = f"{FAST}, --sim-fault, load_fails"
    first, second = (text_of(words, failover=failover) for words in (SLOW, broken))
    with Device() as site:
        async with site.kept(first, **ONE) as rolling:
            await site.in_place(rolling, 1)
            async with site.busy(SHORT, 10 * SHORT) as answers:
                await site.apply(rolling, second)
                await site.until(lambda: rolling.state.undone == 2, "it to be undone")
                await site.in_place(rolling, 1)
            assert fates(answers) == [("", True)] * 2, site.told
            assert fates(site.late) == [("", True)] * len(site.late), site.told
            assert "times in a row" in rolling.state.why


async def test_one_that_no_device_could_hold_takes_nobodys_place() -> None:
    """It is undone before the old one, which is the same process all the while, is told anything."""
    first, second = (text_of(words, failover=False) for words in (SLOW, f'{FAST}, --vault-gib, "64"'))
    with Device() as site:
        async with site.kept(first, **ONE) as rolling:
            await site.in_place(rolling, 1)
            (old,) = site.workers()
            pid = site.supervisor.slots[old].life.pid
            await site.apply(rolling, second)
            await site.until(lambda: rolling.state.undone == 2, "it to be undone")
            await site.in_place(rolling, 1)
            assert (site.workers(), site.supervisor.slots[old].life.pid) == ([old], pid), site.told
            assert rolling.state.downtimes == {}
            assert "MiB of memory on a device, and none has more than " in rolling.state.why


@pytest.mark.parametrize("inexact", [True, False], ids=["allowed", "not allowed"])
async def test_a_stream_ends_on_another_card_only_where_the_manifest_allows_it(inexact: bool) -> None:
    """In place, with another card: a stream that outlives its set is held until the new one is in place. Then it goes
    on there and says so, or fails by name."""
    first, second = (text_of(words, failover=False, inexact=inexact) for words in (SLOW, OTHER_CARD))
    assert [check(text.encode()).manifest is not None for text in (first, second)] == [True, True]
    with Device() as site:
        async with site.kept(first, **ONE) as rolling:
            await site.in_place(rolling, 1)
            async with site.busy(SHORT, LONG) as answers:
                await site.apply(rolling, second)
                await site.in_place(rolling, 2)
            short, long = answers
            assert fates([short]) == [("", True)], site.told
            if inexact:
                assert fates([long]) == [("", False)], site.told
            else:
                assert long.error is not None
                assert long.error["code"] == "Replaced", long.error
            assert fates(site.late) == [("", True)] * len(site.late), site.told


def test_the_manifests_word_is_the_rollouts() -> None:
    """It replaces nobody: the sets are the same with it and without."""
    texts = [text_of(SLOW, failover=False, inexact=inexact) for inexact in (True, False)]
    manifests = [check(text.encode()).manifest for text in texts]
    yes, no = (revision_of(one, 1) for one in manifests if one is not None)
    assert (yes.sets, yes.parts["Worker"].inexact, no.parts["Worker"].inexact) == (no.sets, True, False)
