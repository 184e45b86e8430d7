"""The vault: one process per device that keeps the pages' descriptors, decides who may use them, and maps nothing.

It opens no CUDA context and imports neither torch nor cuda. This file is the process; vault.py is what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from holdfast.memory.kept import KeptRecords, VaultFds, ignore_children
from holdfast.memory.vault import Vault
from holdfast.memory.vault_settings import VaultSettings

log = logging.getLogger("holdfast.vault")


async def serve(settings: VaultSettings, fds: VaultFds, command: list[str]) -> None:
    """Run a vault until the lifeline closes or SIGTERM comes."""
    ignore_children()
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    stop: Callable[[], None] = over.set
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_reader(fds.lifeline, stop)
    kept = KeptRecords(fds, command)
    await kept.load()
    vault = Vault(settings, kept, socket.socket(fileno=fds.listener))
    vault.start()
    if settings.status_address:
        await _show_status(settings, vault)
    await over.wait()
    loop.remove_reader(fds.lifeline)
    vault.end()


async def _show_status(settings: VaultSettings, vault: Vault) -> None:
    """The page is a convenience: a vault whose address is taken serves memory without it."""
    from holdfast.memory.status_page import serve_status  # not needed otherwise, and not small

    try:
        vault.status_address = await serve_status(settings.status_address, settings.device, vault.facts)
    except (OSError, ValueError) as error:
        log.error("no status page at %s: %s", settings.status_address, error)


def raise_fd_limit() -> None:
    """Slabs, clients and their processes are descriptors here: take as many as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str]) -> int:
    """`python -m holdfast.memory.server JSON LISTENER LINK LIFELINE`"""
    settings = msgspec.json.decode(argv[0], type=VaultSettings)
    form = f"%(asctime)s {settings.device} %(levelname)s %(message)s"
    logging.basicConfig(level="INFO", format=form, datefmt="%H:%M:%S", stream=sys.stderr)
    raise_fd_limit()
    fds = VaultFds(*(int(text) for text in argv[1:4]))
    asyncio.run(serve(settings, fds, [sys.executable, "-m", "holdfast.memory.server", argv[0]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
