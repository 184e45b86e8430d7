"""The vault's process, one per device (vault.py has the logic). It holds the descriptors of the device's pages and
decides which clients may use them.

It maps no pages, opens no CUDA context and imports neither torch nor cuda. Exception: a vault with a host memory budget
opens the device and maps pages while it moves weights or has them in host memory (warm.py).
Always true: one vault serves a socket. It holds an exclusive lock beside the socket before it serves and until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.address import parse_address
from holdfast.core.flock import is_at_path, try_flock
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.log_files import log_to_own_file
from holdfast.core.ports import SystemClock
from holdfast.core.tasks import first, true_within
from holdfast.memory.vault import pool_machine, warm_machine, weights_machine
from holdfast.memory.vault.keeper import SERVER, TAKEN, announce
from holdfast.memory.vault.records import VaultFds, VaultRecords
from holdfast.memory.vault.settings import VaultSettings
from holdfast.memory.vault.vault import Vault

# The metrics of a vault's status page.
GAUGES = (
    ("weights_bytes", "bytes of weights kept on the device, uncommitted ones too"),
    ("pool_bytes", "bytes of the KV pool and its index"),
    ("device_bytes", "bytes kept on the device, all that the budget counts"),
    ("host_bytes", "bytes of host memory taken for weights that are not on the device"),
    ("readers", "sessions that hold the weights"),
    ("waiting", "sessions that wait for weights or pool"),
    ("pool_epoch", "the epoch the pool was last granted to"),
)
# The metrics that count the machines' effects.
COUNTERS: dict[str, tuple[tuple[type, ...], str]] = {
    "grants_read": ((weights_machine.GrantRead,), "weights granted to a reader"),
    "grants_write": ((weights_machine.GrantWrite,), "write locks granted"),
    "commits": ((weights_machine.Committed,), "weights committed"),
    "aborts": ((weights_machine.Aborted,), "writers that ended before their commit"),
    "pool_grants": ((pool_machine.GrantPool,), "grants of the pool"),
    "cpu_fences": ((pool_machine.CpuFence,), "CPU fences passed"),
    "gpu_fences": ((pool_machine.GpuFence,), "GPU fences passed"),
    "demotions": ((warm_machine.FreeDevice,), "moves of the weights to host memory"),
    "promotions": ((warm_machine.RecordSlabs,), "moves of the weights back to the device"),
    "timeouts": ((weights_machine.LockTimedOut, pool_machine.PoolTimedOut), "waits that ended without a grant"),
    "refusals": (
        (weights_machine.RefuseLock, pool_machine.RefusePool, warm_machine.RefuseMove),
        "requests refused",
    ),
}


class VaultMetrics:
    """A vault's metrics page, built from its current `facts`."""

    def __init__(self, device: str, facts: Callable[[], dict[str, Any]]) -> None:
        from holdfast.wire import metrics  # a fifth of what a vault loads, and few have a page

        self._device = device
        self._facts = facts
        self._registry = metrics.MetricsRegistry()
        self._gauges = {
            name: metrics.Gauge(f"holdfast_vault_{name}", text, ("device",), registry=self._registry)
            for name, text in GAUGES
        }
        self._state = metrics.Gauge(
            "holdfast_vault_state", "1 for the state of a tag", ("device", "tag", "state"), registry=self._registry
        )
        self._counters = {
            name: metrics.Counter(f"holdfast_vault_{name}", text, ("device",), registry=self._registry)
            for name, (_, text) in COUNTERS.items()
        }

    def page(self) -> bytes:
        from holdfast.wire import metrics

        facts = self._facts()
        for name, gauge in self._gauges.items():
            gauge.labels(self._device).set(facts[name])
        self._state.clear()
        for tag, state in (("weights", facts["weights"]), ("kv_cache", facts["pool"].partition("(")[0])):
            self._state.labels(self._device, tag, state).set(1)
        for name, (effects, _) in COUNTERS.items():
            count = sum(facts["counts"].get(effect.__name__, 0) for effect in effects)
            metrics.catch_up(self._counters[name].labels(self._device), count)
        return metrics.page(self._registry)


log = logging.getLogger("holdfast.vault")

# The previous vault's death may be known a moment before the kernel frees its lock.
LOCK_S = 2.0
LOCK_POLL_S = 0.02


async def serve(settings: VaultSettings, fds: VaultFds, command: list[str]) -> int:
    """Run a vault until the lifeline closes or SIGTERM comes; return its exit status."""
    if not await lock_socket(settings.lock):
        log.error("another vault holds %s: leaving it to that one", settings.lock)
        return TAKEN
    announce(fds.lifeline, SERVER, os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps keepers: the vault never waits for them
    loop = asyncio.get_running_loop()
    over, asked = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    loop.add_reader(fds.lifeline, over.set)
    records = VaultRecords(fds, command)
    await records.load()
    vault = Vault(settings, records, socket.socket(fileno=fds.listener), SystemClock())
    vault.start()
    if settings.status_address:
        await _show_status(settings, vault)
    await first((over.wait(), asked.wait()))
    loop.remove_reader(fds.lifeline)
    vault.end(meant=asked.is_set())
    return 0


async def _show_status(settings: VaultSettings, vault: Vault) -> None:
    """Serve `/live`, `/health` and `/metrics`. If the address is taken, log it: the vault runs without them."""
    from holdfast.wire.http.server import HttpServer
    from holdfast.wire.http.status_page import StatusPage
    from holdfast.wire.net import SocketNetwork

    page = StatusPage(vault.facts, VaultMetrics(settings.device, vault.facts).page)
    try:
        server = HttpServer(page.handle, SocketNetwork())
        vault.status_address = str(await server.start(parse_address(settings.status_address)))
    except (OSError, ValueError) as error:
        log.error("no status page at %s: %s", settings.status_address, error)


async def lock_socket(path: Path) -> bool:
    """Take the socket's lock until this process ends; return False if another vault has it. Never removes the file."""

    def locked() -> bool:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if try_flock(descriptor) and is_at_path(descriptor, path):
            return True
        os.close(descriptor)
        return False

    return await true_within(locked, LOCK_S, LOCK_POLL_S)


def main(argv: list[str]) -> int:
    """Run `python -m holdfast.memory.vault.server JSON LISTENER LINK LIFELINE`"""
    settings = msgspec.json.decode(argv[0], type=VaultSettings)
    log_to_own_file("INFO", f"%(asctime)s {settings.device} %(levelname)s %(message)s")
    raise_descriptor_limit()
    fds = VaultFds(*(int(text) for text in argv[1:4]))
    return asyncio.run(serve(settings, fds, [sys.executable, "-m", "holdfast.memory.vault.server", argv[0]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
