"""From a URL to a store's client."""

from __future__ import annotations

import random

from holdfast.core.address import parse_address
from holdfast.core.errors import UserError
from holdfast.core.ports import Network
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Store


def open_store(url: str, network: Network, rng: random.Random) -> Store:
    """`unix://…` and `tcp://…` are the embedded store, `etcd://host:port[,host:port…]` is etcd. Call `start` next."""
    if url.startswith("etcd://"):
        # Here, not above: aiohttp is an extra that only etcd needs.
        from holdfast.store.etcd_client import EtcdStore, parse_endpoints

        return EtcdStore(parse_endpoints(url), rng)
    try:
        return EmbeddedStore(parse_address(url), network, rng)
    except ValueError as error:
        raise UserError(f"store {error}; a store may also be etcd://host:2379") from error
