"""Memory that outlives processes: the vault that keeps pages, and the API of its clients.

These names are the package's public API (docs/memory.md). They are imported on first use, so that importing the package
loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.memory.client.calls import MemoryLost, StaleMemoryLayoutError, VaultRefused
    from holdfast.memory.client.pool import PoolClient
    from holdfast.memory.client.weights import MemoryClient
    from holdfast.memory.devices import open_device
    from holdfast.memory.layout import Layout, TensorSpec
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

_MODULES = {
    "memory.client.calls": ("MemoryLost", "StaleMemoryLayoutError", "VaultRefused"),
    "memory.client.pool": ("PoolClient",),
    "memory.client.weights": ("MemoryClient",),
    "memory.devices": ("open_device",),
    "memory.layout": ("Layout", "TensorSpec"),
    "memory.vault.launch": ("VaultProcesses",),
    "memory.vault.settings": ("VaultSettings",),
    "memory.writer_lock": ("WriterLock",),
    "spec.names": ("socket_path",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"holdfast.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
