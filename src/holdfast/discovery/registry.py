"""The registry of instances in the store: a pure machine that turns watch events into changes of instances.

Always true:
- An instance is known once its key and its card are both in the store and the card can be admitted.
- Its key is under INSTANCES or STANDBYS; a move from STANDBYS to INSTANCES is no change.
- A changed address or card makes a new instance under the old key.
- A deleted key is reported as `Withdrawn`; the receiver keeps a worker whose connection is up.
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
        """Return its name in logs and `holdfast status`."""
        return self.record.name or f"worker {self.key.instance:x}"


@dataclass(frozen=True, slots=True)
class Appeared:
    instance: Instance


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The instance's key is gone from the store, or its record or card changed."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A worker that cannot be admitted; it must be told the reason."""

    key: InstanceKey
    record: InstanceRecord | None
    reason: str


Change = Appeared | Withdrawn | NotAdmitted


class Registry:
    """The instances of one or several deployments, by store key."""

    def __init__(self, *deployments: str) -> None:
        self._deployments = frozenset(deployments)
        self._values: dict[str, bytes] = {}
        # Records of standbys whose key is gone and whose card is still there: they are becoming instances. The two
        # prefixes are watched separately, so the old key's deletion may arrive first. At most one per card.
        self._moving: dict[InstanceKey, bytes] = {}
        self.instances: dict[InstanceKey, Instance] = {}
        self.refused: dict[InstanceKey, str] = {}  # the reasons of workers that are not admitted

    def snapshot(self, prefix: str, items: dict[str, bytes]) -> list[Change]:
        """Apply all keys of the store under `prefix` (INSTANCES, STANDBYS or CARDS)."""
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
        """Return the instance of a key; None for keys of other deployments, which are ignored."""
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
