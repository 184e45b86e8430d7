"""Taking a deployment off a Ray cluster, and where that is still to be done.

Always true: what is written down in a state directory (`Left`) is there before anything is on the cluster, and goes
when nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core.address import parse_address
from holdfast.roles.ray import cluster
from holdfast.roles.ray.cluster import Gone
from holdfast.supervise.records import write_whole
from holdfast.wire.net import SocketNetwork

REACH_S = 5.0  # for a cluster's port to be open; Ray itself would try for two minutes
STOP_S = 10.0  # for all agents at once, each with its replicas


class Left(msgspec.Struct, frozen=True):
    """A deployment that may have something on a cluster."""

    deployment: str
    address: str

    def path(self, state_dir: Path) -> Path:
        return state_dir / "ray" / f"left-{self.deployment}-{self.address}.json"

    def write(self, state_dir: Path) -> None:
        write_whole(self.path(state_dir), msgspec.json.encode(self))


def left_in(state_dir: Path) -> list[Left]:
    """All that a state directory knows of."""
    found = []
    for path in sorted((state_dir / "ray").glob("left-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Left))
    return found


async def take_away(left: Left, state_dir: Path, tell: Callable[[str], None]) -> None:
    """What somebody left who was killed. A cluster whose head is gone ends all that it had by itself."""
    where = f"{left.deployment} on the Ray cluster {left.address}"
    try:
        transport = await SocketNetwork().connect(parse_address(f"tcp://{left.address}"), asyncio.Protocol, REACH_S)
    except ConnectionRefusedError:
        tell(f"{where} is gone with its head")
    except (OSError, TimeoutError, ValueError) as error:
        tell(f"{where} is left there: {error or 'nothing comes back'}; `holdfast down` tries again")
        return
    else:
        transport.close()
        try:
            await cluster.asked(cluster.connect, left.address, left.deployment)
            await clear(left.deployment)
            await cluster.asked(cluster.leave)
        except TimeoutError:
            tell(f"{where} is left there: Ray does not answer in time; `holdfast down` tries again")
            return
        tell(f"{where} is taken away")
    left.path(state_dir).unlink(missing_ok=True)


async def clear(deployment: str) -> None:
    """Agents first, which end their replicas in order. TimeoutError: Ray's control store does not answer."""
    names = await cluster.asked(cluster.actors)
    agents = [name for name in names if name.startswith(cluster.agent_name(deployment, ""))]
    await asyncio.gather(*(_stop(name) for name in agents))
    for name in await cluster.asked(cluster.actors):
        if (handle := await cluster.asked(cluster.find, name)) is not None:
            await cluster.asked(cluster.kill, handle)
    for group in await cluster.asked(cluster.groups, cluster.groups_of(deployment)):
        await cluster.asked(cluster.remove_group, group)


async def _stop(name: str) -> None:
    handle = await cluster.asked(cluster.find, name)
    if handle is not None:
        with contextlib.suppress(Gone, TimeoutError):
            await cluster.answer(handle.stop.remote(), STOP_S)
