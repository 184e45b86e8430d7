"""A store's URL, looked at before anything is opened: whether there is such a store, and where it is."""

from __future__ import annotations

from holdfast.core.address import parse_address
from holdfast.core.errors import UserError

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
