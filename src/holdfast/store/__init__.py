"""Key-value with leases and watches: one contract, an embedded store for one machine and etcd for a cluster."""

from holdfast.store.contract import (
    Deleted,
    Lost,
    Put,
    Registration,
    Snapshot,
    Store,
    StoreUnavailable,
    Watch,
    WatchEvent,
)
from holdfast.store.opening import open_store

__all__ = [
    "Deleted",
    "Lost",
    "Put",
    "Registration",
    "Snapshot",
    "Store",
    "StoreUnavailable",
    "Watch",
    "WatchEvent",
    "open_store",
]
