"""From a URL to a lock: every form there is, and words for those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.address import TcpAddress, UnixAddress
from holdfast.failover.etcd_lock import LEASE_S, EtcdLock
from holdfast.failover.file_lock import FileLock
from holdfast.failover.lock_server.client import ServerLock
from holdfast.failover.opening import open_lock
from holdfast.wire.world import real_world


@pytest.mark.parametrize("url", ["/run/x/engine.lock", "flock:///run/x/engine.lock"])
async def test_a_file(url: str) -> None:
    """A bare path (FAILOVER_LOCK_PATH) and flock:// name the same lock; nothing is made yet."""
    lock = open_lock(url, "engine 0", real_world())
    assert isinstance(lock, FileLock)
    assert (lock.path, lock.who) == (Path("/run/x/engine.lock"), "engine 0")
    assert not lock.path.parent.exists()


@pytest.mark.parametrize(
    ("url", "address"),
    [("lock+unix:///run/lock.sock", UnixAddress("/run/lock.sock")), ("lock+tcp://h:7", TcpAddress("h", 7))],
)
async def test_a_server(url: str, address: object) -> None:
    """A lock server is reached at the address behind `lock+`."""
    lock = open_lock(url, "engine 0", real_world(), token="secret")
    assert isinstance(lock, ServerLock)
    assert str(address) in repr(lock)
    assert "secret" not in repr(lock)


async def test_etcd() -> None:
    """Endpoints, a key with slashes in it, and a lease if one is named."""
    lock = open_lock("etcd://a:1,b:2/locks/engine-0", "engine 0", real_world())
    assert isinstance(lock, EtcdLock)
    assert (lock.url, lock.key, lock.lease_s) == ("etcd://a:1,b:2", "locks/engine-0", LEASE_S)
    lock = open_lock("etcd://a:1/k?lease_s=9", "engine 0", real_world())
    assert isinstance(lock, EtcdLock)
    assert (lock.key, lock.lease_s) == ("k", 9)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("", "no kind of lock"),
        ("engine.lock", "no kind of lock"),
        ("http://h:1", "no kind of lock"),
        ("flock://relative", "absolute path"),
        ("lock+tcp://h", "needs host:port"),
        ("lock+unix://relative", "absolute path"),
        ("etcd://h/key", "needs host:port"),
        ("etcd:///key", "no endpoint"),
        ("etcd://h:1", "no key"),
        ("etcd://h:1/", "no key"),
        ("etcd://h:1/k?lease_s=0", "not a lease"),
        ("etcd://h:1/k?ttl=5", "not a lease"),
    ],
)
async def test_what_is_wrong_is_said(url: str, wrong: str) -> None:
    """A ValueError says what is wrong and which forms there are."""
    with pytest.raises(ValueError, match=wrong) as told:
        open_lock(url, "engine 0", real_world())
    assert "lock+tcp://host:port" in str(told.value)
