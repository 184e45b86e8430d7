"""The sim engine's weights: any changed byte is found, and a launch that cannot be is refused by its field."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.core.errors import HoldfastError, UserError
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.hosted import SimWeights
from holdfast.memory.client.weights import MappedWeights
from holdfast.memory.devices import HostDevice
from holdfast.memory.layout import plan
from holdfast.roles.engines import make_engine
from holdfast.spec.engines import FailoverSettings, SimSettings
from holdfast.spec.launch import WorkerLaunch
from tests.rigs.engines.sim_engine import FAST, rig

MIB = 1024 * 1024


@pytest.fixture
def written() -> Iterator[tuple[HostDevice, SimWeights, MappedWeights]]:
    """Weights of 3 slabs, filled and mapped writable."""
    device, weights = HostDevice(), SimWeights("test", 6 * MIB)
    layout = plan(weights.specs, 2 * MIB, device.granularity, weights.identity, weights.meta)
    fds = [device.create(size) for size in layout.slab_sizes]
    address = device.reserve(sum(layout.slab_sizes))
    device.map_many(address, list(zip(layout.slab_sizes, fds, strict=True)), writable=True)
    mapped = MappedWeights(layout, address, sum(layout.slab_sizes), fds)
    weights.fill(mapped.addresses())
    yield device, weights, mapped
    weights.use(None)
    mapped.forget(device)


def test_any_changed_byte_is_found(written: tuple[HostDevice, SimWeights, MappedWeights]) -> None:
    """What was filled verifies; one byte changed in any tensor does not, whichever it is; changed back it does."""
    device, weights, mapped = written
    assert weights.verify(mapped) == ""
    rng = random.Random(3)
    for failover in mapped.layout.tensors:
        at = mapped.addresses()[failover.name] + rng.randrange(failover.size_bytes)
        was = device.read(at, 1)
        device.write(at, bytes([was[0] ^ 1 << rng.randrange(8)]))
        assert "add up" in weights.verify(mapped)
        device.write(at, was)
    assert weights.verify(mapped) == ""


def test_other_weights_do_not_verify(written: tuple[HostDevice, SimWeights, MappedWeights]) -> None:
    """Weights of another identity are not taken for these, though they have the same shapes."""
    _, weights, mapped = written
    other = SimWeights("other", 6 * MIB)
    assert [spec.shape for spec in other.specs] == [spec.shape for spec in weights.specs]
    assert "not other" in other.verify(mapped)


def test_every_word_of_the_head_is_read(written: tuple[HostDevice, SimWeights, MappedWeights]) -> None:
    """Steps read the head word by word, so a changed one makes exactly one step of a round wrong."""
    device, weights, mapped = written
    weights.use(mapped)
    assert all(weights.right() for _ in range(512))
    device.write(mapped.addresses()["head"] + 100 * 8, b"\1\2\3\4\5\6\7\10")
    assert [failover for failover in range(512) if not weights.right()] == [100]


def test_the_weights_take_what_the_pool_leaves_and_at_least_a_slab() -> None:
    """Whole slabs of 2 MiB, one at least."""
    assert sum(spec.size_bytes for spec in SimWeights("test", -5).specs) == 2 * MIB
    assert sum(spec.size_bytes for spec in SimWeights("test", 7 * MIB).specs) == 6 * MIB


def launch(**fields: Any) -> WorkerLaunch:
    return WorkerLaunch(state_dir="/tmp/none", deployment="test", **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"failover": {"standby": "asleep"}}, "standby"),
        ({"failover": {"kv": "disk"}}, "kv"),
        ({"failover": {"wake_s": 0.0}}, "wake_s"),
        ({"lock": "flock:/tmp/x"}, "lock"),
        ({"failover": {"vault_socket": "/tmp/x.sock"}}, "vault_socket"),
        ({"sim": {"ranks": 2}}, "ranks"),
        ({"sim": {"ranks": 0}}, "ranks"),
        ({"sim": {"vault_gib": -1.0}}, "vault_gib"),
        ({"sim": {"poison_token": -2}}, "poison_token"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_by_its_field(fields: dict[str, Any], named: str) -> None:
    """A ValueError says which field."""
    kinds = {"failover": FailoverSettings, "sim": SimSettings}

    def made() -> object:
        given = {name: kinds[name](**value) if name in kinds else value for name, value in fields.items()}
        return make_engine(launch(**given), random.Random(1))

    with pytest.raises(ValueError, match=named):
        made()


def test_a_vault_makes_an_engine_that_can_stand_by() -> None:
    """With a vault and a lock the engine is a failover engine; without, none that could stand by."""
    plain = make_engine(launch(), random.Random(1))
    assert type(plain.engine) is SimEngine
    with pytest.raises(UserError, match="vault_socket"):
        plain.failover_engine()
    made = make_engine(
        launch(failover=FailoverSettings(vault_socket="/tmp/x.sock"), lock="flock:/tmp/x"), random.Random(1)
    )
    assert made.failover_engine() is made.engine


def test_those_that_stand_by_for_each_other_share_a_namespace() -> None:
    """What places a worker does not name it; what decides about its answers does."""
    failover = FailoverSettings(vault_socket="/tmp/x.sock", engine_id=1, standby="unmapped")
    assert launch(lock="flock:/tmp/x", group="g", failover=failover).namespace() == launch().namespace()
    assert launch(sim=SimSettings(vault_gib=1.0)).namespace() != launch().namespace()


async def test_faults_of_vault_memory_need_a_vault() -> None:
    """An engine without a vault refuses them by name and goes on."""
    async with rig(**FAST) as r:
        for kind in ("wake_fails", "wake_hangs", "memory_flip"):
            with pytest.raises(HoldfastError, match=kind):
                r.fault(fault=kind)
