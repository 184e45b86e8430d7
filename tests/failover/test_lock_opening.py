"""From a URL to a lock: every form there is, and words for those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.failover.etcd_lock import LEASE_S
from holdfast.failover.opening import open_lock
from holdfast.wire.net import real_world


@pytest.mark.parametrize(
    ("url", "shown", "lease_s"),
    [
        ("/run/x/engine.lock", "lock /run/x/engine.lock: not held by engine 0", None),
        ("flock:///run/x/engine.lock", "lock /run/x/engine.lock: not held by engine 0", None),
        ("lock+unix:///run/lock.sock", "lock at unix:///run/lock.sock: not held by engine 0", None),
        ("lock+tcp://h:7", "lock at tcp://h:7: not held by engine 0", None),
        ("etcd://a:1,b:2/locks/0", "lock etcd://a:1,b:2/locks/0: not held by engine 0", LEASE_S),
        ("etcd://a:1/k?lease_s=9", "lock etcd://a:1/k: not held by engine 0", 9),
    ],
)
def test_every_form(url: str, shown: str, lease_s: int | None) -> None:
    """A bare path (FAILOVER_LOCK_PATH) and flock:// name the same lock; a lock server is at the address behind `lock+`;
    etcd has endpoints, a key with slashes in it, and a lease if one is named. Nothing is made, no token is shown."""
    lock = open_lock(url, "engine 0", real_world(), token="secret")
    assert repr(lock) == shown
    assert getattr(lock, "lease_s", None) == lease_s
    assert not Path("/run/x").exists()


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
