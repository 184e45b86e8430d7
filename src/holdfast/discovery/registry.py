"""What the store says is there: a pure machine from watch events to changes of instances.

Always true: an instance is known once its key and its card are both there and the card can be admitted; its key may
stand among the instances or among the standbys, and moving from there to here is no change; a changed address or card
is a new instance under the old key; a key's disappearance is reported as `Withdrawn`, and what that means for a worker
whose own connection is alive is the receiver's to decide (it means nothing).
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.discovery.card import ModelCard, decode_card
from holdfast.discovery.keys import (
    CARDS,
    INSTANCES,
    STANDBYS,
    InstanceKey,
    InstanceRecord,
    decode_record,
    parse_key,
)


@dataclass(frozen=True, slots=True)
class Instance:
    """One worker as the store describes it."""

    key: InstanceKey
    record: InstanceRecord
    card: ModelCard

    @property
    def name(self) -> str:
        """As logs and `holdfast ps` call it."""
        return self.record.name or f"worker {self.key.instance:x}"


@dataclass(frozen=True, slots=True)
class Appeared:
    instance: Instance


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Its key is gone from the store."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A worker that must be told why it gets no work."""

    key: InstanceKey
    record: InstanceRecord | None
    reason: str


Change = Appeared | Withdrawn | NotAdmitted


class Registry:
    """Instances of one deployment, or of several, by store key."""

    def __init__(self, *deployments: str) -> None:
        self._deployments = frozenset(deployments)
        self._values: dict[str, bytes] = {}
        # Records of standbys whose key went while their card stayed: on the way to being instances. The two prefixes
        # are watched apart, so the old key's end may be heard of first. At most one per card.
        self._moving: dict[InstanceKey, bytes] = {}
        self.instances: dict[InstanceKey, Instance] = {}
        self.refused: dict[InstanceKey, str] = {}  # why, for those that get no work

    def snapshot(self, prefix: str, items: dict[str, bytes]) -> list[Change]:
        """The store's whole truth under `prefix` (INSTANCES, STANDBYS or CARDS)."""
        gone = [key for key in self._values if key.startswith(prefix) and key not in items]
        changes: list[Change] = []
        for key in gone:
            changes += self.deleted(key)
        for key, value in items.items():
            changes += self.put(key, value)
        return changes

    def put(self, key: str, value: bytes) -> list[Change]:
        where = self._ours(key)
        if where is None or self._values.get(key) == value:
            return []
        self._values[key] = value
        if not key.startswith(CARDS):
            self._moving.pop(where, None)
        return self._reconsider(where)

    def deleted(self, key: str) -> list[Change]:
        where = self._ours(key)
        value = self._values.pop(key, None) if where is not None else None
        if where is None or value is None:
            return []
        if key.startswith(STANDBYS) and CARDS + where.path in self._values:
            self._moving[where] = value
        else:
            self._moving.pop(where, None)
        return self._reconsider(where)

    def _ours(self, key: str) -> InstanceKey | None:
        """The instance a key speaks of; None for other deployments' keys, which are not even kept."""
        where = parse_key(INSTANCES, key) or parse_key(STANDBYS, key) or parse_key(CARDS, key)
        return where if where is not None and where.deployment in self._deployments else None

    def _reconsider(self, where: InstanceKey) -> list[Change]:
        old = self.instances.get(where)
        new = self._read(where)
        if not isinstance(new, NotAdmitted):
            self.refused.pop(where, None)
        if new == old:
            return []
        changes: list[Change] = []
        if old is not None:
            del self.instances[where]
            changes.append(Withdrawn(old))
        if isinstance(new, NotAdmitted):
            if self.refused.get(where) != new.reason:
                self.refused[where] = new.reason
                changes.append(new)
        elif new is not None:
            self.instances[where] = new
            changes.append(Appeared(new))
        return changes

    def _read(self, where: InstanceKey) -> Instance | NotAdmitted | None:
        values = self._values
        record_bytes = values.get(INSTANCES + where.path, values.get(STANDBYS + where.path, self._moving.get(where)))
        card_bytes = self._values.get(CARDS + where.path)
        if record_bytes is None or card_bytes is None:
            return None
        record: InstanceRecord | None = None
        try:
            record = decode_record(record_bytes)
            card = decode_card(card_bytes)
        except (ValueError, RecursionError) as error:
            return NotAdmitted(where, record, f"cannot read its record or card: {error}")
        problem = card.problem()
        if problem is None and card.checksum() != record.checksum:
            problem = f"its card's checksum is {card.checksum()}, its record says {record.checksum}"
        return NotAdmitted(where, record, problem) if problem else Instance(where, record, card)
