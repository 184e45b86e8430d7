"""Engines that are loading: while one of a set is, its streams are not given up. Pure.

An engine that starts, or that has to load its weights before it can lead, stands in the store with the time it may
take (`discovery.keys.LoadingRecord`). Always true: a record counts from when it was first heard of, for no longer than
it says; one that disappears counts for `GRACE_S` more, since an engine that has loaded is about to be elected and
connected to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.discovery.keys import LOADINGS, InstanceKey, decode_loading, parse_key

GRACE_S = 10.0  # from the end of a load to the first work: an election, a wake and a connection, on a busy machine
RECORDS_MAX = 4096  # that are kept: more engines than one frontend has


class Loading(NamedTuple):
    """An engine that is loading."""

    name: str
    checksum: str  # of its model's card
    until_s: float  # it is ready by then, or not at all


class Loadings:
    """The engines that are loading, of all deployments that a frontend serves."""

    def __init__(self, deployments: frozenset[str], clock: Callable[[], float]) -> None:
        self._deployments, self._clock = deployments, clock
        self._known: dict[InstanceKey, Loading] = {}

    def put(self, path: str, value: bytes) -> Loading | None:
        """Take note of a record; return it if it is news. ValueError: it cannot be read."""
        key = parse_key(LOADINGS, path)
        if key is None or key.deployment not in self._deployments or len(self._known) >= RECORDS_MAX:
            return None
        record = decode_loading(value)
        before = self._known.get(key)
        said = Loading(record.name, record.checksum, self._clock() + record.within_s)
        if before is not None and before.until_s > self._clock() + GRACE_S:
            return None  # the store told of it again: it does not begin again
        self._known[key] = said
        return said

    def deleted(self, path: str) -> None:
        key, over_s = parse_key(LOADINGS, path), self._clock() + GRACE_S
        known = self._known.get(key) if key is not None else None
        if key is not None and known is not None:
            self._known[key] = known._replace(until_s=min(known.until_s, over_s))
        self._known = {each: one for each, one in self._known.items() if one.until_s > self._clock()}

    def snapshot(self, paths: frozenset[str]) -> None:
        """These and no others are in the store; each is `put`, too."""
        for key in [key for key in self._known if LOADINGS + key.path not in paths]:
            self.deleted(LOADINGS + key.path)

    def latest(self, namespace: str, checksum: str) -> Loading | None:
        """Return the engine of this set that may take longest, if one is loading."""
        now_s = self._clock()
        found = [
            one
            for key, one in self._known.items()
            if (key.namespace, one.checksum) == (namespace, checksum) and one.until_s > now_s
        ]
        return max(found, key=lambda one: one.until_s, default=None)
