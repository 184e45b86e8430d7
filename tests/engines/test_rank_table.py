"""Ranks of one engine that agree on what they found: each comes to the same answer, and a lost one is an error."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from holdfast.engines.shadow.table import LeadersTable, RanksTable
from holdfast.kv.adopt import QUARANTINED, REFUSED, YOURS, Survey

WAKE_S = 30.0
KEYS = [bytes([number]) * 16 for number in range(3)]


def survey(*verdicts: int, keys: list[bytes] = KEYS) -> Survey:
    return Survey("", 7, 0, bytes(verdicts), b"".join(keys))


@dataclass
class Group:
    leader: LeadersTable
    ranks: list[RanksTable]
    theirs: list[socket.socket]
    fences: list[str]


@pytest.fixture
def group() -> Iterator[Group]:
    """A leader and two others."""
    pairs = [socket.socketpair() for _ in range(2)]
    for each in (each for pair in pairs for each in pair):
        each.setblocking(False)
    fences: list[str] = []

    async def fenced() -> None:
        fences.append("waited for")

    leader = LeadersTable([ours for ours, _ in pairs], WAKE_S, fenced)
    ranks = [RanksTable(rank, theirs, WAKE_S) for rank, (_, theirs) in enumerate(pairs, 1)]
    yield Group(leader, ranks, [theirs for _, theirs in pairs], fences)
    for each in (each for pair in pairs for each in pair):
        each.close()


async def test_a_block_is_believed_where_every_rank_has_it(group: Group) -> None:
    """The same block under another key is nobody's; what one has in quarantine, all have."""
    first = survey(YOURS, YOURS, YOURS)
    second = survey(YOURS, YOURS, QUARANTINED)
    third = survey(YOURS, YOURS, YOURS, keys=[KEYS[0], KEYS[2], KEYS[2]])
    found = await asyncio.gather(
        group.leader.agree(first), group.ranks[0].agree(second), group.ranks[1].agree(third)
    )
    assert [each.verdicts for each in found] == [bytes([YOURS, REFUSED, QUARANTINED])] * 3
    again = await asyncio.gather(*(each.agree(first) for each in (group.leader, *group.ranks)))
    assert [each.verdicts for each in again] == [bytes([YOURS] * 3)] * 3


async def test_a_rank_that_is_gone_is_an_error_at_once(group: Group) -> None:
    """Nobody believes anything of a pool that not everyone was asked about."""
    waiting = asyncio.ensure_future(group.leader.agree(survey(YOURS, YOURS, YOURS)))
    others = asyncio.ensure_future(group.ranks[0].agree(survey(YOURS, YOURS, YOURS)))
    group.theirs[1].close()
    with pytest.raises(ConnectionError):
        await waiting
    others.cancel()


async def test_the_leader_alone_waits_for_the_others_fences(group: Group) -> None:
    """It alone gives blocks to anybody."""
    await group.ranks[0].fenced()
    assert group.fences == []
    await group.leader.fenced()
    assert group.fences == ["waited for"]
