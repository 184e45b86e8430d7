"""Opens a store's client from its URL."""

from __future__ import annotations

import random

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.spec.names import check_url, parse_endpoints
from holdfast.store.client import EmbeddedStore
from holdfast.store.contract import Store


def open_store(url: str, network: Network, rng: random.Random) -> Store:
    """Return a client: `unix://…` and `tcp://…` are the embedded store, `etcd://host:port[,host:port…]` is etcd. Call
    `start` next."""
    if url.startswith("etcd://"):
        # Imported here: aiohttp is an extra that only etcd needs.
        from holdfast.store.etcd_client import EtcdStore

        return EtcdStore(parse_endpoints(url), rng)
    check_url(url)
    return EmbeddedStore(parse_address(url), network, rng)
