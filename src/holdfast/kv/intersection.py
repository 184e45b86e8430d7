"""What the ranks of one engine tell each other when they take their pools over, as bytes of one size on every rank.

Each rank surveys its own index, all get all surveys, and each comes to the same answer by itself: a block is kept where
every rank has it whole under one key, and quarantined where any rank has it so (`adopt.agree`). Always true: ranks with
as many blocks and keys as wide send as many bytes; nothing is stored in any index before all have been heard.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.kv.adopt import FREE, REFUSED, YOURS, Adoption, Survey, agree
from holdfast.kv.index import Index

HEAD_BYTES = 256  # a reason is a few words


class _Head(msgspec.Struct, frozen=True, array_like=True):
    reason: str
    epoch: int
    adoptions: int
    blocks: int
    key_bytes: int


def packed(found: Survey) -> bytes:
    head = msgspec.json.encode(_Head(found.reason, found.epoch, found.adoptions, len(found.verdicts), found.key_bytes))
    assert len(head) <= HEAD_BYTES, "a reason is a few words"
    return head.ljust(HEAD_BYTES) + found.verdicts + found.keys


def unpacked(data: bytes) -> Survey:
    head = msgspec.json.decode(data[:HEAD_BYTES].rstrip(), type=_Head)
    verdicts, keys = data[HEAD_BYTES:][: head.blocks], data[HEAD_BYTES + head.blocks :]
    assert len(keys) == head.key_bytes * head.blocks, "a survey was cut"
    return Survey(head.reason, head.epoch, head.adoptions, verdicts, keys)


def agreed(ranks: Sequence[bytes], rank: int) -> Survey:
    """What `rank` is to settle its index by."""
    return agree([unpacked(data) for data in ranks])[rank]


def of_new(index: Index, found: Survey, epoch: int) -> Adoption:
    """A pool that was made under this very epoch, in a group that took others over: nothing in it is whole, and what
    is quarantined on another rank is not to be used on this one."""
    verdicts = np.frombuffer(found.verdicts, np.uint8)
    assert not np.any(verdicts == YOURS), "a new pool has no whole block"
    final = np.where(verdicts == REFUSED, np.uint8(FREE), verdicts).tobytes()
    return Adoption(index, epoch, 0, found.reason, final, found.keys, {})
