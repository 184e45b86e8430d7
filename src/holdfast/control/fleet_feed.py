"""Feeds a fleet's controller with what changes in the store, and knows which values its writes replace.

Always true: a value that cannot be read changes nothing, and is logged once; the fleet's record and orders have one
writer, and another's name in them ends this one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from holdfast.core.errors import UserError
from holdfast.discovery.keys import CORDONS, MODELS, NODES, ORDERS, REPORTS
from holdfast.fleet.desired import Cordon
from holdfast.fleet.planner import FleetController
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord, Orders, fleet_key, read
from holdfast.health.records import Demand, ReportRecord

log = logging.getLogger("holdfast.control")

T = TypeVar("T", DesiredModel, Cordon, NodeRecord, Orders, FleetRecord)

UNREAD_CORDON = Cordon(drain=False)  # one that cannot be read: the node takes nothing new, and nothing leaves it


class Overtaken(Exception):
    """Another control writes this fleet's orders."""


class FleetFeed:
    """The feed of one controller, which writes as `by`."""

    def __init__(self, deployment: str, by: str) -> None:
        self._by = by
        self.record_key = fleet_key(deployment)
        own = f"{deployment}/"
        self.desired, self.nodes, self.orders, self._reports = MODELS + own, NODES + own, ORDERS + own, REPORTS + own
        self._cordons = CORDONS + own
        self.prefixes = (self.record_key, self.orders, self.desired, self.nodes, self._cordons, self._reports)
        self._fed: dict[str, bytes] = {}
        self.controller = FleetController(deployment, by)
        self.held: dict[str, bytes] = {}  # record and orders as stored, from what was read and written since
        self._removed: set[str] = set()  # orders that this one removed, and that the store has not reported yet

    def begin(self, values: Mapping[str, bytes], now_s: float) -> None:
        """Begin from what is stored. UserError, if record or orders cannot be read: everything stays as it is."""
        self._fed = {key: value for key, value in values.items() if self._is_ours(key)}
        self.held = {key: value for key, value in self._fed.items() if self._is_written(key)}
        orders = {key: read(Orders, key, value) for key, value in self.held.items() if key != self.record_key}
        record = (
            read(FleetRecord, self.record_key, self.held[self.record_key])
            if self.record_key in self.held
            else FleetRecord()
        )
        found = {key: value for key, value in self._fed.items() if key not in self.held}
        models = {key: self._decode_desired(key, found[key]) for key in found if key.startswith(self.desired)}
        nodes = {key: self._decode_node(key, found[key]) for key in found if key.startswith(self.nodes)}
        self.controller.begin(
            record,
            {key.removeprefix(self.orders): one for key, one in orders.items()},
            {key.removeprefix(self.desired): one for key, one in models.items() if one is not None},
            {key.removeprefix(self.nodes): one for key, one in nodes.items() if one is not None},
            now_s,
            unread=[key.removeprefix(self.nodes) for key, one in nodes.items() if one is None],
            cordons={
                key.removeprefix(self._cordons): _read(Cordon, key, found[key]) or UNREAD_CORDON
                for key in found
                if key.startswith(self._cordons)
            },
        )
        for key in [key for key, one in models.items() if one is None]:
            self.controller.desired_unreadable(key.removeprefix(self.desired))
        for key in [key for key in found if key.startswith(self._reports)]:
            self._apply(key, found[key], now_s)

    def feed(self, values: Mapping[str, bytes], now_s: float) -> None:
        """Feed every change. Overtaken, if another control wrote the record or orders."""
        fed = self._fed
        for key in [key for key in fed if key not in values]:
            del fed[key]
            self._apply(key, None, now_s)
        for key, value in values.items():
            if fed.get(key) != value and self._is_ours(key):
                fed[key] = value
                self._apply(key, value, now_s)

    def hold(self, key: str, value: bytes | None) -> None:
        """Note a value that this one wrote; None: it removed it."""
        self.held.pop(key, None)
        if value is None:
            self._removed.add(key)
        else:
            self.held[key] = value

    def last_fed(self, key: str) -> bytes | None:
        """Return the value of a key that was last fed to the controller."""
        return self._fed.get(key)

    def _is_ours(self, key: str) -> bool:
        """Return False for another fleet's record: the prefix of `foo` also matches `foobar`."""
        return key == self.record_key or not key.startswith(self.record_key)

    def _is_written(self, key: str) -> bool:
        return key == self.record_key or key.startswith(self.orders)

    def _apply(self, key: str, value: bytes | None, now_s: float) -> None:
        if self._is_written(key):
            self._check_writer(key, value)
        elif key.startswith(self.desired):
            name, desired = key.removeprefix(self.desired), None if value is None else self._decode_desired(key, value)
            if value is not None and desired is None:
                self.controller.desired_unreadable(name)
            else:
                self.controller.set_desired(name, desired)
        elif key.startswith(self.nodes):
            name, record = key.removeprefix(self.nodes), None if value is None else self._decode_node(key, value)
            if value is not None and record is None:
                self.controller.node_unreadable(name, now_s)
            else:
                self.controller.on_node_record(name, record, now_s)
        elif key.startswith(self._cordons):
            cordon = None if value is None else _read(Cordon, key, value)
            if value is None or cordon is not None:
                self.controller.set_cordon(key.removeprefix(self._cordons), cordon)
        else:
            self.controller.on_frontend_report(key.removeprefix(self._reports), _demand(value))

    def _check_writer(self, key: str, value: bytes | None) -> None:
        """Raise Overtaken if another wrote. Its own values come late, when the next are written already."""
        if value is None and key in self._removed:
            self._removed.discard(key)
            return
        if value is None:
            raise Overtaken(f"{key} was removed")
        by = read(FleetRecord, key, value).by if key == self.record_key else read(Orders, key, value).by
        if by != self._by:
            raise Overtaken(f"{key} was written by {by or 'nobody'}")

    def _decode_desired(self, key: str, value: bytes) -> DesiredModel | None:
        desired = _read(DesiredModel, key, value)
        return desired if desired is None or _is_about(key, desired.model.key) else None

    def _decode_node(self, key: str, value: bytes) -> NodeRecord | None:
        record = _read(NodeRecord, key, value)
        names = set() if record is None else {record.node.name, *(one.node for one in record.replicas)}
        return record if all(_is_about(key, name) for name in names) else None


def _read(kind: type[T], key: str, value: bytes) -> T | None:
    try:
        return read(kind, key, value)
    except UserError as error:
        log.warning("%s; it is taken for unchanged", error)
        return None


def _is_about(key: str, name: str) -> bool:
    fine = key.rpartition("/")[2] == name
    if not fine:
        log.warning("the store's %s is about %s; it is taken for unchanged", key, name)
    return fine


def _demand(value: bytes | None) -> dict[str, Demand] | None:
    """Return the waiting requests of a frontend's report; None: it has none, or is gone."""
    if value is None:
        return None
    try:
        report = msgspec.json.decode(value, type=ReportRecord)
    except (ValueError, RecursionError):
        return None  # it is logged where reports are summed
    return report.demand
