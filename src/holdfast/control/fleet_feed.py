"""Tells a fleet's controller of what changes in the store, and knows what it must be written over.

Always true: what cannot be read changes nothing, and is logged once for each value; of the book and of orders, which
one writes alone, another's words end that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from holdfast.core.errors import UserError
from holdfast.discovery.keys import MODELS, NODES, ORDERS, REPORTS
from holdfast.fleet.controller import Controller
from holdfast.fleet.records import Book, NodeRecord, Orders, Wish, book_key, read
from holdfast.health.records import Demand, ReportRecord

log = logging.getLogger("holdfast.control")

T = TypeVar("T", Wish, NodeRecord, Orders, Book)


class Overtaken(Exception):
    """Another control writes this fleet's orders."""


class FleetFeed:
    """Of one controller, which writes as `by`."""

    def __init__(self, deployment: str, by: str) -> None:
        self._by = by
        self.book = book_key(deployment)
        own = f"{deployment}/"
        self.wishes, self.nodes, self.orders, self._reports = MODELS + own, NODES + own, ORDERS + own, REPORTS + own
        self.prefixes = (self.book, self.orders, self.wishes, self.nodes, self._reports)
        self._told: dict[str, bytes] = {}
        self.controller = Controller(deployment, by)
        self.held: dict[str, bytes] = {}  # book and orders as they stand, by what was read and written since
        self._removed: set[str] = set()  # orders that this one took away, and that is not told yet

    def begin(self, values: Mapping[str, bytes], now_s: float) -> None:
        """Go on from what stands. UserError, if book or orders cannot be read: everything stays as it is."""
        self._told = {key: value for key, value in values.items() if self._is_ours(key)}
        self.held = {key: value for key, value in self._told.items() if self._is_written(key)}
        orders = {key: read(Orders, key, value) for key, value in self.held.items() if key != self.book}
        book = read(Book, self.book, self.held[self.book]) if self.book in self.held else Book()
        found = {key: value for key, value in self._told.items() if key not in self.held}
        wishes = {key: self._wish(key, found[key]) for key in found if key.startswith(self.wishes)}
        nodes = {key: self._node(key, found[key]) for key in found if key.startswith(self.nodes)}
        self.controller.begin(
            book,
            {key.removeprefix(self.orders): one for key, one in orders.items()},
            {key.removeprefix(self.wishes): one for key, one in wishes.items() if one is not None},
            {key.removeprefix(self.nodes): one for key, one in nodes.items() if one is not None},
            now_s,
            unread=[key.removeprefix(self.nodes) for key, one in nodes.items() if one is None],
        )
        for key in [key for key, one in wishes.items() if one is None]:
            self.controller.wish_unread(key.removeprefix(self.wishes))
        for key in [key for key in found if key.startswith(self._reports)]:
            self._tell(key, found[key], now_s)

    def feed(self, values: Mapping[str, bytes], now_s: float) -> None:
        """Whatever is other than it was. Overtaken, if that is what only this one writes."""
        told = self._told
        for key in [key for key in told if key not in values]:
            del told[key]
            self._tell(key, None, now_s)
        for key, value in values.items():
            if told.get(key) != value and self._is_ours(key):
                told[key] = value
                self._tell(key, value, now_s)

    def hold(self, key: str, value: bytes | None) -> None:
        """It was written; None: it was removed."""
        self.held.pop(key, None)
        if value is None:
            self._removed.add(key)
        else:
            self.held[key] = value

    def told(self, key: str) -> bytes | None:
        """What stands there, as far as the controller was told."""
        return self._told.get(key)

    def _is_ours(self, key: str) -> bool:
        """A prefix of the store is a string's: `foo` would have `foobar`'s book too."""
        return key == self.book or not key.startswith(self.book)

    def _is_written(self, key: str) -> bool:
        return key == self.book or key.startswith(self.orders)

    def _tell(self, key: str, value: bytes | None, now_s: float) -> None:
        if self._is_written(key):
            self._look_at_writer(key, value)
        elif key.startswith(self.wishes):
            name, wish = key.removeprefix(self.wishes), None if value is None else self._wish(key, value)
            if value is not None and wish is None:
                self.controller.wish_unread(name)
            else:
                self.controller.wish(name, wish)
        elif key.startswith(self.nodes):
            name, record = key.removeprefix(self.nodes), None if value is None else self._node(key, value)
            if value is not None and record is None:
                self.controller.node_unread(name, now_s)
            else:
                self.controller.node(name, record, now_s)
        else:
            self.controller.report(key.removeprefix(self._reports), _demand(value))

    def _look_at_writer(self, key: str, value: bytes | None) -> None:
        """Its own words come late, when the next are written already."""
        if value is None and key in self._removed:
            self._removed.discard(key)
            return
        if value is None:
            raise Overtaken(f"{key} was removed")
        by = read(Book, key, value).by if key == self.book else read(Orders, key, value).by
        if by != self._by:
            raise Overtaken(f"{key} was written by {by or 'nobody'}")

    def _wish(self, key: str, value: bytes) -> Wish | None:
        wish = _read(Wish, key, value)
        return wish if wish is None or _is_about(key, wish.model.key) else None

    def _node(self, key: str, value: bytes) -> NodeRecord | None:
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
    """Of a frontend's report; one that does not say who waits says that nobody does."""
    if value is None:
        return None
    try:
        report = msgspec.json.decode(value, type=ReportRecord)
    except (ValueError, RecursionError):
        return None  # it is told where reports are summed
    return report.demand
