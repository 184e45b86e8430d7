"""The vault: one process per device that keeps the pages' descriptors, decides who may use them, and maps nothing.

It opens no CUDA context and imports neither torch nor cuda; one that is allowed host memory does so, and maps pages,
while it moves weights or has them in host memory (moving.py). This file is the process; vault.py is what it does.
Always true: one vault serves a socket: it holds an exclusive lock beside it from before its first word to its end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from holdfast.core.clock import SystemClock
from holdfast.core.flock import is_at_path, try_flock
from holdfast.core.limits import raise_descriptor_limit
from holdfast.core.log_files import log_to_own_file
from holdfast.memory.vault.keeper import TAKEN
from holdfast.memory.vault.kept import KeptRecords, VaultFds, ignore_children
from holdfast.memory.vault.members import SERVER, announce
from holdfast.memory.vault.settings import VaultSettings
from holdfast.memory.vault.vault import Vault

log = logging.getLogger("holdfast.vault")

# For the vault before this one, which may be known as dead a moment before its lock is free.
LOCK_S = 2.0
LOCK_POLL_S = 0.02


async def serve(settings: VaultSettings, fds: VaultFds, command: list[str]) -> int:
    """Run a vault until the lifeline closes or SIGTERM comes; its exit status."""
    if not await lock_socket(settings.lock):
        log.error("another vault holds %s: leaving it to that one", settings.lock)
        return TAKEN
    announce(fds.lifeline, SERVER, os.getpid())
    ignore_children()
    loop = asyncio.get_running_loop()
    over, asked = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _set_both, over, asked)
    loop.add_reader(fds.lifeline, over.set)
    kept = KeptRecords(fds, command)
    await kept.load()
    vault = Vault(settings, kept, socket.socket(fileno=fds.listener), SystemClock())
    vault.start()
    if settings.status_address:
        await _show_status(settings, vault)
    await over.wait()
    loop.remove_reader(fds.lifeline)
    vault.end(meant=asked.is_set())
    return 0


def _set_both(over: asyncio.Event, asked: asyncio.Event) -> None:
    asked.set()
    over.set()


async def _show_status(settings: VaultSettings, vault: Vault) -> None:
    """The page is a convenience: a vault whose address is taken serves memory without it."""
    from holdfast.memory.vault.status_page import serve_status  # not needed otherwise, and not small

    try:
        vault.status_address = await serve_status(settings.status_address, settings.device, vault.facts)
    except (OSError, ValueError) as error:
        log.error("no status page at %s: %s", settings.status_address, error)


async def lock_socket(path: Path) -> bool:
    """Hold the socket's lock until this process ends; False: another vault has it. The file is never removed."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + LOCK_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if try_flock(descriptor) and is_at_path(descriptor, path):
            return True
        os.close(descriptor)
        if loop.time() > until_s:
            return False
        await asyncio.sleep(LOCK_POLL_S)


def main(argv: list[str]) -> int:
    """`python -m holdfast.memory.vault.server JSON LISTENER LINK LIFELINE`"""
    settings = msgspec.json.decode(argv[0], type=VaultSettings)
    form = f"%(asctime)s {settings.device} %(levelname)s %(message)s"
    log_to_own_file("INFO", form)
    raise_descriptor_limit()
    fds = VaultFds(*(int(text) for text in argv[1:4]))
    return asyncio.run(serve(settings, fds, [sys.executable, "-m", "holdfast.memory.vault.server", argv[0]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
