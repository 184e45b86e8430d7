"""Makes and checks names: of deployments, namespaces, processes, devices, vault sockets and stores. No I/O.

Always true: two deployments, or two generations of one, never share a namespace; each device name has one socket.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.address import UNIX_PATH_BYTES_MAX, parse_address
from holdfast.core.errors import UserError

_DEPLOYMENT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# Used in file names, in a shell and in `ps`: needs no quoting, and cannot leave the directory.
_PROCESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"host-\d+")
_PLACEMENT_ONLY = frozenset({"replicas", "workers", "port", "ports", "host"})


def check_deployment_name(name: str) -> None:
    if not _DEPLOYMENT.fullmatch(name):
        raise ValueError(f"deployment name {name!r} must be 1-63 of a-z, 0-9 and '-', with no '-' at either end")


def check_process_name(name: str) -> None:
    if not _PROCESS.fullmatch(name):
        mend = "must be 1-63 letters, digits, '.', '_' and '-', and begin with a letter or digit"
        raise ValueError(f"{name!r} {mend}")


def canonical_hash(value: Any) -> str:
    """Return a hash of plain data that does not depend on the order of dictionaries."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def set_hash(settings: dict[str, Any]) -> str:
    """Return the hash that identifies a set of workers: of all settings except number, host and ports."""
    return canonical_hash({key: value for key, value in settings.items() if key not in _PLACEMENT_ONLY})[:8]


def namespace_of(deployment: str, hash8: str) -> str:
    check_deployment_name(deployment)
    return f"{deployment}-{hash8}"


def namespace_for(deployment: str, settings: dict[str, Any]) -> str:
    return namespace_of(deployment, set_hash(settings))


def pod_name(deployment: str, service: str, hash8: str) -> str:
    """Return the name of a set's replicas, without their number."""
    return f"{deployment}-{service.lower()}-{hash8}"


def group_of(lock: str, host: str) -> str:
    """Return the group name of engines with the same lock. For a path the name depends on the host, because the same
    path is another file on another machine."""
    path = re.sub(r"^(flock|lock\+unix)://", "", lock)
    local = "://" not in path
    stem = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:20] or "engines"
    whose = f"{host if local else ''} {path}"
    return f"{stem}-{hashlib.sha256(whose.encode()).hexdigest()[:8]}"


def is_host(device: str) -> bool:
    """Return True if a device's name means host memory."""
    return _HOST.fullmatch(device) is not None


def socket_path(folder: Path, device: str) -> str:
    """Return the socket path of a device's vault; raise UserError if it is too long."""
    path = str(folder / f"gms_{device.replace('/', '_')}.sock")
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        longest = f"a socket may have {UNIX_PATH_BYTES_MAX} bytes"
        raise UserError(f"{path} is too long ({longest}); choose a shorter --socket-dir")
    return path


def room_for_socket(folder: Path, name: str) -> int | None:
    """Return None if a socket of this name fits into the folder; else the maximum length of the folder's path in
    bytes."""
    too_many = len(str(folder / name).encode()) - UNIX_PATH_BYTES_MAX
    return None if too_many <= 0 else len(str(folder).encode()) - too_many


def node_dir(state_dir: Path, node: str) -> Path:
    """Return the state directory of a fleet's node; each node on one machine has its own."""
    return state_dir / "nodes" / node


def own_page(state_dir: Path, name: str) -> str:
    """Return the address of a frontend's own status page, as several frontends may share a port; "" if the path is too
    long."""
    path = f"{state_dir}/run/{name}.http"
    return f"unix://{path}" if len(path.encode()) <= UNIX_PATH_BYTES_MAX else ""


def control_lock(state_dir: str, store: str, deployment: str) -> str:
    """Return the default lock that elects a deployment's leading control: in etcd if that is the store, else a file. A
    file works on one machine; controls on several machines need an explicit lock."""
    if store.startswith("etcd://"):
        return f"{store.rstrip('/')}/v1/locks/{deployment}/control"
    return f"flock://{state_dir}/run/control-{deployment}.lock"


def chaos_path(state_dir: str, name: str) -> Path:
    """Return the path at which a worker receives faults to inject."""
    return Path(state_dir) / "run" / f"{name}.chaos"


# -- URLs of stores


FORMS = "a store is etcd://127.0.0.1:2379 (or several, with commas), tcp://host:port, or unix:///path"


def check_url(url: str) -> None:
    """Raise UserError if a store's URL is invalid."""
    if url.startswith("etcd://"):
        parse_endpoints(url)
    elif not url.startswith(("tcp://", "unix://")):
        raise UserError(f"store {url!r}: there is no such store; {FORMS}")
    else:
        try:
            parse_address(url)
        except ValueError as error:
            raise UserError(f"store: {error}; {FORMS}") from error


def parse_endpoints(url: str) -> tuple[str, ...]:
    """Return the endpoints of `etcd://host1:2379,host2:2379`; raise UserError if one is invalid."""
    endpoints = tuple(part for part in url.removeprefix("etcd://").rstrip("/").split(",") if part)
    for endpoint in endpoints:
        host, found, port = endpoint.rpartition(":")
        if not (found and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
            raise UserError(f"store {url!r}: {endpoint!r} needs host:port, e.g. etcd://127.0.0.1:2379")
    if not endpoints:
        raise UserError(f"store {url!r} names no endpoint, e.g. etcd://127.0.0.1:2379")
    return endpoints
