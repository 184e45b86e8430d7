"""Ray, as far as it is used here: nodes and their devices, actors by name, placement groups. Nothing else imports it.

What Ray knows it is asked for: which nodes there are, what of their resources is taken, whether an actor lives. Actors
are detached and never restarted by Ray: who owns one makes it again, by its own rules.

Always true: calls block for as long as Ray's control store takes, so whoever has an event loop makes them in a thread,
within a bound (`asked`); what an actor answers is waited for within a bound, and its death ends the wait (`answer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

from holdfast.core.errors import Refused, UserError

OLDEST = (2, 60)  # placement groups that name their node by its label
ASK_S = 45.0  # for Ray's control store, which answers in milliseconds; to become a driver took 5 s under load
DEVICE = "holdfast_device"  # what a node without GPUs declares: `ray start --resources '{"holdfast_device": 2}'`
GPU = "GPU"
MEMORY = "memory"  # of the host, in bytes, as Ray counts it
NODE_LABEL = "ray.io/node-id"
SHARE_MIN = 0.0001  # Ray counts in ten-thousandths

T = TypeVar("T")
P = ParamSpec("P")
Handle = Any  # of an actor


class Gone(Exception):
    """The actor that was asked is not there any more, or failed to answer by an error of its own."""


@dataclass(frozen=True, slots=True)
class RayNode:
    id: str
    host: str  # its address
    resource: str = ""  # what its devices are counted as; "": it has none
    devices: int = 0
    memory_bytes: int = 0  # of its host, that Ray gives away

    @property
    def name(self) -> str:
        """All nodes of a test's cluster have one hostname."""
        return self.id[:8]


# -- names


def namespace_of(deployment: str) -> str:
    return f"holdfast-{deployment}"


def agent_name(deployment: str, node: str) -> str:
    return f"HoldfastAgent:{deployment}:{node}"


def groups_of(deployment: str, node: str = "") -> str:
    """How the names of its placement groups begin; a replica's own name follows."""
    return f"Holdfast:{deployment}:{node}:" if node else f"Holdfast:{deployment}:"


def host_group(deployment: str, node: str) -> str:
    """Of the placement group that has the host memory for WARM replicas of a node."""
    return groups_of(deployment, node) + "host"


# -- the library


def check_installed() -> None:
    """UserError says what is missing."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--backend ray needs Ray, which is not installed; pip install 'holdfast-llm[ray]'")
    here = version("ray")
    if tuple(int(part) for part in here.split(".")[:2]) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise UserError(f"Ray {here} is installed, and --backend ray needs {least}; pip install 'holdfast-llm[ray]'")


def connect(address: str, deployment: str) -> None:
    """Become a driver of the cluster. Not from the main thread: there Ray takes SIGTERM for itself."""
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it leaves SIGTERM to us
    try:
        ray.init(
            address=address or "auto",
            namespace=namespace_of(deployment),
            log_to_driver=False,
            configure_logging=False,
        )
    except ConnectionError as error:
        raise Refused("no Ray cluster runs here; start one with `ray start --head`, or name it: --address") from error
    except RuntimeError as error:
        raise Refused(f"the Ray cluster cannot be used: {' '.join(str(error).split())}") from error


def address() -> str:
    """Of the cluster that this is a driver of."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def leave() -> None:
    import ray

    ray.shutdown()


async def asked(call: Callable[P, T], *words: P.args, **more: P.kwargs) -> T:
    """In a thread, within a bound: TimeoutError. A thread of its own, which nobody waits for at the end: what hangs in
    Ray is not to keep this process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def told(deed: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else deed())

    def run() -> None:
        try:
            result = call(*words, **more)
        except Exception as error:
            raised = error
            told(lambda: done.set_exception(raised))
        else:
            told(lambda: done.set_result(result))

    threading.Thread(target=run, name="ray", daemon=True).start()
    return await asyncio.wait_for(done, ASK_S)


async def answer(reference: Any, bound_s: float | None) -> Any:
    """What an actor says. Gone: it never will; TimeoutError: it has not yet."""
    from ray.exceptions import ActorUnavailableError, RayError

    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), bound_s)
    except ActorUnavailableError as error:
        raise TimeoutError("it cannot be reached at this moment") from error
    except RayError as error:
        raise Gone(in_short(str(error))) from error


def in_short(words: str) -> str:
    """What Ray says of an actor's end, without its name and without advice."""
    line = " ".join(words.split()).partition(" Some common causes")[0]
    return line.rpartition("Worker exit detail: ")[2]


# -- nodes


def nodes() -> list[RayNode]:
    """Those that live."""
    import ray

    return [_node(one) for one in ray.nodes() if one["Alive"]]


def _node(told: Mapping[str, Any]) -> RayNode:
    has = told["Resources"]
    resource = next((name for name in (GPU, DEVICE) if has.get(name, 0) >= 1), "")
    counts = int(has.get(resource, 0)), int(has.get(MEMORY, 0))
    return RayNode(told["NodeID"], told["NodeManagerAddress"], resource, *counts)


# -- actors


def on_node(node: str) -> dict[str, Any]:
    """There or nowhere, for `begin`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def in_group(group: Any, resource: str, share: float) -> dict[str, Any]:
    """In the first bundle of a placement group, all of which it takes; for `begin`."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    takes: dict[str, Any] = {"num_gpus": share} if resource == GPU else {"resources": {resource: share}}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0), **takes}


def begin(where: Mapping[str, Any], kind: type, name: str, *words: Any) -> Handle:
    """The actor of this name that there is, or else a new one, made of `words`."""
    import ray

    options = {"name": name, "lifetime": "detached", "max_restarts": 0, "num_cpus": 0, "get_if_exists": True}
    return ray.remote(kind).options(**options, **where).remote(*words)


def find(name: str) -> Handle | None:
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def actors() -> list[str]:
    """Names of all that live, of this deployment."""
    import ray

    return list(ray.util.list_named_actors())


def kill(handle: Handle) -> None:
    """Ray takes it for dead at once; a stopped process stays where it is."""
    import ray

    ray.kill(handle, no_restart=True)


# -- placement groups


def make_group(name: str, bundles: Sequence[Mapping[str, float]], node: str) -> Any:
    """All of them on this node; it outlives who made it. The one of that name, if there is one."""
    from ray.util.placement_group import get_placement_group, placement_group

    with contextlib.suppress(ValueError):  # there is none
        return get_placement_group(name)
    here = [{NODE_LABEL: node}] * len(bundles)
    return placement_group(
        [dict(bundle) for bundle in bundles],
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=here,
    )


def is_group_of(name: str, bundle: Mapping[str, float]) -> bool:
    """Whether there is one of this name, and it is that one bundle."""
    from ray.util.placement_group import get_placement_group

    try:
        return list(get_placement_group(name).bundle_specs) == [bundle]
    except ValueError:
        return False


def is_placed(group: Any, bound_s: float) -> bool:
    """Whether Ray found room for it in time."""
    return bool(group.wait(bound_s))


def groups(prefix: str) -> list[str]:
    """Names of those that there are."""
    from ray.util.placement_group import placement_group_table

    there = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    return [one["name"] for one in there if one["name"].startswith(prefix)]


def remove_group(name: str) -> None:
    """What it held is free again."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(get_placement_group(name))


def share_of(promised: int, total: int) -> float:
    """Of a device, as Ray counts it; rounded down, so that what fits by bytes fits in Ray too."""
    if not promised or promised >= total:
        return 1.0
    return max(SHARE_MIN, int(promised / total / SHARE_MIN) * SHARE_MIN)
