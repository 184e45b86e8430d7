"""How things are called: deployments, namespaces, processes, devices, the sockets of their vaults, and stores. Pure.

Always true: two deployments, or two generations of one, never share a namespace; one device's name means one socket.
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
# In names of files and sockets, in a shell and in `ps`: nothing to quote, and no way out of the directory.
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
    """A hash of plain data that does not depend on the order of dictionaries."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def set_hash(settings: dict[str, Any]) -> str:
    """What tells one set of workers from the next: of all that they are told but how many, and on which ports."""
    return canonical_hash({key: value for key, value in settings.items() if key not in _PLACEMENT_ONLY})[:8]


def namespace_of(deployment: str, hash8: str) -> str:
    """Where a set of a deployment stands."""
    check_deployment_name(deployment)
    return f"{deployment}-{hash8}"


def namespace_for(deployment: str, settings: dict[str, Any]) -> str:
    """Where the set stands that these settings make."""
    return namespace_of(deployment, set_hash(settings))


def pod_name(deployment: str, service: str, hash8: str) -> str:
    """How the replicas of a set are called, before their number."""
    return f"{deployment}-{service.lower()}-{hash8}"


def group_of(lock: str, host: str) -> str:
    """The name that engines with the same lock share. A path means another file on another machine, an address does
    not."""
    path = re.sub(r"^(flock|lock\+unix)://", "", lock)
    local = "://" not in path
    stem = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")[:20] or "engines"
    whose = f"{host if local else ''} {path}"
    return f"{stem}-{hashlib.sha256(whose.encode()).hexdigest()[:8]}"


def is_host(device: str) -> bool:
    """Whether a device's name means host memory."""
    return _HOST.fullmatch(device) is not None


def socket_path(folder: Path, device: str) -> str:
    """Where the vault of a device listens."""
    path = str(folder / f"gms_{device.replace('/', '_')}.sock")
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        longest = f"a socket may have {UNIX_PATH_BYTES_MAX} bytes"
        raise UserError(f"{path} is too long ({longest}); choose a shorter --socket-dir")
    return path


def node_dir(state_dir: Path, node: str) -> Path:
    """The state directory of a node that joined a fleet: several on one machine have each their own."""
    return state_dir / "nodes" / node


def own_page(state_dir: Path, name: str) -> str:
    """Where a frontend answers for itself alone: its port may be shared. "" if its name is too long for a socket."""
    path = f"{state_dir}/run/{name}.http"
    return f"unix://{path}" if len(path.encode()) <= UNIX_PATH_BYTES_MAX else ""


def control_lock(state_dir: str, store: str, deployment: str) -> str:
    """Where the controls of a deployment elect the one that decides: all that share an etcd meet there; any other store
    is one machine's, or somebody says a lock that its machines share."""
    if store.startswith("etcd://"):
        return f"{store.rstrip('/')}/v1/locks/{deployment}/control"
    return f"flock://{state_dir}/run/control-{deployment}.lock"


def chaos_path(state_dir: str, name: str) -> Path:
    """Where a worker that may be broken on purpose is told how."""
    return Path(state_dir) / "run" / f"{name}.chaos"


# -- stores, looked at before anything is opened: whether there is such a one, and where it is


FORMS = "a store is etcd://127.0.0.1:2379 (or several, with commas), tcp://host:port, or unix:///path"


def check_url(url: str) -> None:
    """UserError names what is wrong with it."""
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
    """The endpoints of `etcd://host1:2379,host2:2379`."""
    endpoints = tuple(part for part in url.removeprefix("etcd://").rstrip("/").split(",") if part)
    for endpoint in endpoints:
        host, found, port = endpoint.rpartition(":")
        if not (found and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
            raise UserError(f"store {url!r}: {endpoint!r} needs host:port, e.g. etcd://127.0.0.1:2379")
    if not endpoints:
        raise UserError(f"store {url!r} names no endpoint, e.g. etcd://127.0.0.1:2379")
    return endpoints
