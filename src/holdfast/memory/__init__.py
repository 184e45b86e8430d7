"""Memory that outlives processes: the vault that keeps pages, and what its clients call.

These names are the face of this room (docs/memory.md). They are looked up when asked for, so that importing the room
loads neither torch nor numpy, nor anything else behind them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.memory.client.calls import MemoryLost
    from holdfast.memory.client.pool import PoolClient
    from holdfast.memory.client.weights import MemoryClient
    from holdfast.memory.devices import open_device
    from holdfast.memory.errors import StaleMemoryLayoutError, VaultRefused
    from holdfast.memory.layout import Layout
    from holdfast.memory.packing import TensorSpec
    from holdfast.memory.vault.launch import VaultProcesses
    from holdfast.memory.vault.settings import VaultSettings
    from holdfast.memory.writer_lock import WriterLock
    from holdfast.spec.names import socket_path

__all__ = [
    "Layout",
    "MemoryClient",
    "MemoryLost",
    "PoolClient",
    "StaleMemoryLayoutError",
    "TensorSpec",
    "VaultProcesses",
    "VaultRefused",
    "VaultSettings",
    "WriterLock",
    "open_device",
    "socket_path",
]

_PLACES = {
    "memory.client.calls": ("MemoryLost",),
    "memory.client.pool": ("PoolClient",),
    "memory.client.weights": ("MemoryClient",),
    "memory.devices": ("open_device",),
    "memory.errors": ("StaleMemoryLayoutError", "VaultRefused"),
    "memory.layout": ("Layout",),
    "memory.packing": ("TensorSpec",),
    "memory.vault.launch": ("VaultProcesses",),
    "memory.vault.settings": ("VaultSettings",),
    "memory.writer_lock": ("WriterLock",),
    "spec.names": ("socket_path",),
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"holdfast.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
