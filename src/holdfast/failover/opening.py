"""Opens an election lock by its URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from holdfast.core.address import parse_address
from holdfast.core.errors import UserError
from holdfast.core.ports import World
from holdfast.failover.file_lock import FileLock
from holdfast.failover.lock import FailoverLock

FORMS = (
    "/path or flock:///path (a file on this machine), lock+unix:///path or lock+tcp://host:port (a lock server), "
    "etcd://host:port[,host:port…]/key[?lease_s=5]"
)


def open_lock(url: str, engine: str, world: World, token: str = "") -> FailoverLock:
    """Return the lock that `url` names, not opened yet. `token`: for a lock server on TCP.

    Raise ValueError with the valid forms if the URL is wrong."""
    scheme, found, rest = url.partition("://")
    try:
        match scheme if found else "":
            case "" if url.startswith("/"):
                return FileLock(Path(url), engine, world.clock)
            case "flock":
                return FileLock(Path(rest), engine, world.clock)
            case "lock+unix" | "lock+tcp":
                # Imported here: a lock file does not need it.
                from holdfast.failover.lock_server.client import ServerLock

                return ServerLock(parse_address(url.removeprefix("lock+")), engine, world, token)
            case "etcd":
                return _etcd(rest, engine, world)
        raise ValueError("it names no kind of lock that there is")
    except ValueError as error:
        raise ValueError(f"lock {url!r}: {error}; a lock is {FORMS}") from error


def _etcd(rest: str, engine: str, world: World) -> FailoverLock:
    # Imported here: aiohttp is an extra that only etcd needs.
    from holdfast.failover.etcd_lock import LEASE_S, EtcdLock
    from holdfast.spec.names import parse_endpoints

    hosts, _, path = rest.partition("/")
    key, _, query = path.partition("?")
    try:
        parse_endpoints(f"etcd://{hosts}")
    except UserError as error:
        raise ValueError(str(error)) from error
    if not key:
        raise ValueError("it names no key after the host, e.g. etcd://127.0.0.1:2379/engine-0")
    options = dict(parse_qsl(query, keep_blank_values=True))
    lease = options.pop("lease_s", str(LEASE_S))
    if options or not (lease.isascii() and lease.isdigit() and int(lease) > 0):
        raise ValueError(f"{query!r} is not a lease in whole seconds, e.g. ?lease_s=5")
    return EtcdLock(f"etcd://{hosts}", key, engine, world, int(lease))
