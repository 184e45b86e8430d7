"""The host device does what every device must, with each kind of page this machine offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import pytest

from holdfast.memory.devices import HostDevice, HostSettings
from holdfast.memory.devices.host import HugePages
from holdfast.memory.devices.host_room import free_huge_bytes, shared_huge_mode
from tests.rigs.memory.device_agent import Peer
from tests.rigs.memory.device_contract import CHECKS, Rig

SLAB_BYTES = 4 * 1024 * 1024


@pytest.fixture(params=get_args(HugePages))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A host device with one setting of huge pages."""
    if request.param == "hugetlb" and free_huge_bytes() < 64 * SLAB_BYTES:
        pytest.skip("this machine's pool of huge pages is too small (vm.nr_hugepages)")
    if request.param == "transparent" and shared_huge_mode() in ("never", "deny"):
        pytest.skip("this machine gives shared memory no transparent huge pages")
    device = HostDevice("host-0", HostSettings(huge_pages=request.param))
    yield Rig(device, lambda: Peer("host-0"), SLAB_BYTES)
    device.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_host_keeps_the_contract(rig: Rig, check: Callable[[Rig], None]) -> None:
    """Each check's name is what must be true."""
    check(rig)


def test_opening_a_host_device_loads_no_gpu_library() -> None:
    """A process with a host device only has neither cuda nor torch in it."""
    with Peer("host-0") as peer:
        assert peer.hello["loaded"] == []
