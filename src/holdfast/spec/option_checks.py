"""Checks option values before anything starts; each error is one line that names the option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from holdfast.core.errors import Refused
from holdfast.core.tiers import UnknownTier, split_key
from holdfast.spec.arguments import Options
from holdfast.spec.engines import refuse_idle
from holdfast.spec.names import check_deployment_name, check_process_name

# Options that are allowed together with a manifest in `holdfast up -f`,
WITH_MANIFEST = frozenset({"--filename", "--config", "--detach", "--untied", "--dry-run", "--host", "--port"}) | {
    *("--status-host", "--store", "--device", "--wait-s")
}
# in `holdfast up --backend local -f`, which starts a fleet from it,
WITH_FLEET = WITH_MANIFEST | {
    *("--backend", "--address", "--node", "--node-devices", "--node-gib", "--status-port"),
    *("--node-address", "--node-host-gib"),
    *("--redis", "--redis-entries-max"),
}
# and in `holdfast deploy -f`, for a running fleet.
IN_A_FLEET = frozenset({"--filename", "KEY", "--wait", "--timeout", "--json", "--store"})

# Options without effect with Ray, which has its own list of nodes.
RAYS = ("--node", "--node-devices", "--node-address", "--device")


def check_given(options: Options, said: Mapping[str, Any]) -> None:
    """Raise Refused for the first given option that is invalid or has no effect. `said`: values by flag, from the
    command line or a file."""
    if "--filename" in said and "--engine" in options:
        with_up = WITH_FLEET if said.get("--backend") else WITH_MANIFEST
        left = with_up if "--workers" in options else IN_A_FLEET
        for flag in (flag for flag in said if flag not in left):
            raise Refused(f"{flag} is for the manifest to say; leave it out, or write it into its service there")
    if "--engine" in options:
        engine = said.get("--engine", options["--engine"].default)
        standbys = said.get("--standbys", options["--standbys"].default if "--standbys" in options else 1)
        vaults = standbys or options["--standbys"].extra.get("vaults", 0)  # in a fleet every engine has a vault
        refuse_idle(engine, vaults, [options[flag] for flag in said])
    if "--backend" in options:
        _check_backend(said)
    for flag, value in said.items():
        _check(flag, value)


def _check_backend(said: Mapping[str, Any]) -> None:
    on_ray = said.get("--backend") == "ray"
    for flag in (flag for flag in RAYS if on_ray and flag in said):
        raise Refused(f"{flag} does nothing with --backend ray: Ray knows its nodes; leave it out")
    if "--address" in said and not on_ray:
        raise Refused("--address does nothing without --backend ray; leave it out")


def _check(flag: str, value: Any) -> None:
    match flag, value:
        case "--deployment", str():  # empty: probably an unset shell variable
            try:
                check_deployment_name(value)
            except ValueError as error:
                raise Refused(f"--deployment: {error}") from error
        case "--node", "":
            raise Refused("--node is empty; is a variable unset? Leave the option out for the usual one")
        case "--name", str():  # used in names of files and sockets
            try:
                check_process_name(value)
            except ValueError as error:
                raise Refused(f"--name {error}") from error
        case "--api-key", tuple():
            check_keys(flag, value)
        case "--cors-origin", tuple():
            _check_origins(value)


def check_keys(flag: str, keys: Iterable[str]) -> None:
    """Raise Refused if a key is invalid. An empty key (an unset shell variable) must not open the server."""
    try:
        sent = [split_key(written)[0] for written in keys]
    except UnknownTier as error:
        raise Refused(f"{flag}: {error}") from error
    for key in sent:
        if not key.strip():
            raise Refused(f"{flag} is empty; is a variable unset? Leave the option out to require no key")
        if key != key.strip() or not key.isprintable():
            raise Refused(f"{flag} has spaces at its ends or control characters, which no client can send")


def _check_origins(origins: Iterable[str]) -> None:
    """Raise Refused if an origin is not in the form that browsers send."""
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and not (parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
            raise Refused(f"--cors-origin {origin!r} is no origin; e.g. https://chat.example.org, or '*' for any")
