"""What each kind of process is started with: plain data, so that a supervisor can write it down and start it again.

A launch whose `state_dir` is empty is a pattern: `spec.plan` makes a deployment's processes of it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from holdfast.core.address import Address, TcpAddress, parse_address
from holdfast.core.tiers import split_key
from holdfast.spec.engines import Place, SimSettings, TorchSettings, VllmSettings
from holdfast.spec.events import EventSettings
from holdfast.spec.health import HealthSettings
from holdfast.spec.levels import LevelSettings
from holdfast.spec.names import check_deployment_name, control_lock, is_host, namespace_for, namespace_of
from holdfast.spec.probes import Probes
from holdfast.spec.settings import Settings, about
from holdfast.spec.waits import HoldSettings, KnownSettings

_SERVING, _FAILOVER = {"panel": "Serving"}, {"panel": "Failover"}
_ALL = ("up", "frontend")
_ENGINES = ("up", "worker", "deploy")
_NAMED = ("up", "worker")  # a fleet calls a model as its key is
_LONE = ("worker", "frontend", "store", "control")
_STORED = ("worker", "frontend", "control")
_STATUS = "Where /live, /health and /metrics are; default tcp://$DYN_SYSTEM_HOST:$DYN_SYSTEM_PORT."
_EVERYWHERE = ("0.0.0.0", "::")  # as hosts to listen on


class Launch(Settings, frozen=True):
    """What every process is told, and whoever keeps it running."""

    state_dir: Annotated[str, about("The directory of its deployment's sockets, logs and records.")] = ""
    name: Annotated[str, about("How `holdfast ps` calls it; default: the next free name.", commands=_LONE)] = ""
    parent: Annotated[int, about("The process that it dies with; 0: it lives on.")] = 0
    log_level: Annotated[str, about("How much it logs.", choices=("debug", "info", "warning", "error"))] = "info"
    probes: Annotated[Probes, about("How it is asked; a startup bound of 0 is its kind's.")] = Probes(startup_s=0.0)
    stop_s: Annotated[float, about("SIGTERM to SIGKILL; 0: by its kind.", "s", min=0)] = 0.0
    env: Annotated[tuple[tuple[str, str], ...], about("Variables that it has besides its starter's.")] = ()


class StoreLaunch(Launch, frozen=True):
    address: Annotated[
        str,
        about("Where to listen, unix:// or tcp://; default: a socket in the state directory.", commands=("store",)),
    ] = ""


class VaultLaunch(Launch, frozen=True):
    """A vault with its keeper, for one device."""

    deployment: Annotated[str, about("Whose replica's memory it keeps; empty: of whoever comes.")] = ""
    device: Annotated[str, about("The device whose memory it keeps: host-1, or a GPU's UUID.")] = ""
    socket_path: Annotated[str, about("Where it listens.")] = ""
    budget_bytes: Annotated[int, about("At most this much, weights and pool; 0: what there is.", "bytes", min=0)] = 0
    host_budget_bytes: Annotated[int, about("Host memory for demoted weights; 0: none.", "bytes", min=0)] = 0
    leased: Annotated[bool, about("Others may have the device's memory while its weights are in host memory.")] = False


class StoredLaunch(Launch, frozen=True):
    """What those are told who find each other in a store."""

    store: Annotated[
        str, about("A store to use, e.g. etcd://127.0.0.1:2379; default: our own.", commands=_STORED, **_SERVING)
    ] = ""
    deployment: Annotated[
        str, about("The deployment's name; default $DYN_NAMESPACE or local.", commands=_STORED, **_SERVING)
    ] = ""


class WorkerLaunch(StoredLaunch, frozen=True):
    engine: Annotated[str, about("What a worker hosts: torch, vllm, or sim, the simulator.", commands=_ENGINES)] = "sim"
    model: Annotated[
        str,
        about("The name clients ask for; default: the model's.", flag="--served-name", commands=_NAMED, **_SERVING),
    ] = "holdfast-sim"
    source: Annotated[
        str,
        about(
            "torch: default (SmolLM2-135M), a directory, a .gguf, a Hub id (org/name), tiny, random:8b; vllm: a "
            "directory or a Hub id; sim: a name.",
            flag="--model",
            commands=_ENGINES,
            **_SERVING,
        ),
    ] = "default"
    cache_dir: Annotated[str, about("Where fetched models are kept.")] = ""
    chat_template: Annotated[
        str,
        about("A Jinja file that makes prompts of chats, in place of the model's own.", commands=_ENGINES, **_SERVING),
    ] = ""
    canary_prompts: Annotated[
        str,
        about(
            "Known questions for control's checks, with the tokens expected: a JSON file, or the JSON itself.",
            commands=_ENGINES,
            **_SERVING,
        ),
    ] = ""
    address: Annotated[str, about("Where frontends connect; port 0 picks a free one.", commands=("worker",))] = (
        "tcp://127.0.0.1:0"
    )
    beat_address: Annotated[
        str, about("Where frontends hear its heartbeat; default: a free port beside it.", commands=("worker",))
    ] = "tcp://127.0.0.1:0"
    status_address: Annotated[str, about(_STATUS, commands=("worker",))] = "tcp://127.0.0.1:0"
    status_any: Annotated[
        bool, about("Where another has the status page's port, take any: it is a wish of ours, not of a person.")
    ] = False
    advertise: Annotated[
        str,
        about(
            "The host that frontends reach it at, where it listens on 0.0.0.0 or behind a NAT.", commands=("worker",)
        ),
    ] = ""
    # Streams are handed back in milliseconds; a frontend or a store that does not take that in time is left.
    drain_s: Annotated[
        float, about("How long leaving may take once asked to stop.", "s", min=0, commands=("worker",), **_SERVING)
    ] = 5.0
    allow_chaos: Annotated[bool, about("Let `holdfast chaos` break workers.", commands=_ENGINES, **_SERVING)] = False
    lock: Annotated[
        str,
        about("The lock that elects the active; default $FAILOVER_LOCK_PATH.", commands=("worker",), **_FAILOVER),
    ] = ""
    lock_token: Annotated[str, about("The token of a lock server on TCP.")] = ""
    group: Annotated[
        str, about("The name that this engine and its standbys share.", commands=("worker",), **_FAILOVER)
    ] = ""
    starting_ready: Annotated[bool, about("Whether probes are answered with ready while it loads.")] = False
    # A manifest's: a set is then what the whole service is told, and not only what decides about answers.
    set_hash: Annotated[
        str, about("Which set it is of; empty: by these settings.", like=(r"|[0-9a-f]{8}", "8 hex digits"))
    ] = ""
    component: Annotated[str, about("What it is, in addresses: worker, or worker-decode and the like.")] = "worker"
    health_endpoints: Annotated[
        tuple[str, ...], about("What must be healthy for /health, by name; none: all there are.")
    ] = ()
    engine_token: Annotated[
        str, about("For `POST /engine/…` from anywhere; empty: only this user's and root's processes here.")
    ] = ""
    core_dumps: Annotated[
        bool, about("Allow core dumps; they delay a failover.", commands=("worker",), **_FAILOVER)
    ] = False
    # The memory plan's: who else has memory of its own on the device.
    standbys: Annotated[int, about("Engines that stand by on the same device.", min=0)] = 0
    device_pairs: Annotated[int, about("Workers that share the device.", min=1)] = 1
    gpus: Annotated[
        tuple[tuple[str, str], ...], about("PCI address and UUID of each GPU it is on; none: those of its place.")
    ] = ()
    place: Annotated[Place, about("Its memory and how it waits.", **_FAILOVER)] = Place()
    sim: Annotated[SimSettings, about("The simulator.", prefix="sim-", panel="The sim engine", engines=("sim",))] = (
        SimSettings()
    )
    torch: Annotated[TorchSettings, about("Our own.", panel="The torch engine", engines=("torch",))] = TorchSettings()
    vllm: Annotated[VllmSettings, about("Stock vLLM.", panel="The vllm engine", engines=("vllm",))] = VllmSettings()

    def check(self) -> None:
        """ValueError names what a process could not start with, of all that can be told without trying."""
        for address in (self.address, self.beat_address):
            self.reached_at(parse_address(address))
        if self.status_address:
            parse_address(self.status_address)
        self.namespace()

    @property
    def kv_gib(self) -> float:
        """Of a real engine's KV pool; 0: left to its device."""
        return (self.vllm if self.engine == "vllm" else self.torch).kv_gib

    def own_place(self) -> Place:
        """Its engine's place, by the worker's own name."""
        return msgspec.structs.replace(self.place, who=self.name)

    def namespace(self) -> str:
        """Where its instances stand: the same for every worker that would answer alike."""
        if self.set_hash:
            return namespace_of(self.deployment, self.set_hash)
        settings: dict[str, Any] = {"engine": self.engine, "model": self.model}
        own: dict[str, Settings] = {"sim": self.sim, "torch": self.torch, "vllm": self.vllm}
        settings |= {self.engine: own.get(self.engine)}
        if self.engine != "sim":  # a GPU rounds otherwise
            settings |= {"source": self.source, "on": "cpu" if is_host(self.place.device) else "gpu"}
        if self.chat_template:
            settings |= {"chat_template": self.chat_template}
        return namespace_for(self.deployment, msgspec.to_builtins(settings))

    def reached_at(self, address: Address) -> Address:
        """What others are told to connect to. ValueError where nobody could."""
        if not isinstance(address, TcpAddress):
            return address
        if not self.advertise and address.host in _EVERYWHERE:
            raise ValueError(f"{address} is where to listen, not where to connect; say with --advertise HOST")
        return TcpAddress(self.advertise or address.host, address.port)


class FrontendLaunch(StoredLaunch, frozen=True):
    shares: Annotated[tuple[str, ...], about("Other deployments whose workers it serves as well.")] = ()
    address: Annotated[str, about("Where it answers HTTP.")] = "tcp://127.0.0.1:8000"
    status_address: Annotated[str, about("Its own pages, beside a port that several share; empty: only there.")] = ""
    api_keys: Annotated[
        tuple[str, ...],
        about(
            "A key clients must send, or KEY=TIER (premium, standard, best_effort); may be repeated. "
            "Also $HOLDFAST_API_KEYS.",
            flag="--api-key",
            commands=_ALL,
            **_SERVING,
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        about(
            "A web origin whose pages may ask from a browser, or '*'; may be repeated. Default: none.",
            flag="--cors-origin",
            commands=_ALL,
            **_SERVING,
        ),
    ] = ()
    body_bytes_max: Annotated[int, about("The largest request body.", "bytes", min=1, commands=("frontend",))] = (
        16 * 1024 * 1024
    )
    drain_s: Annotated[
        float, about("How long answers may finish once asked to stop.", "s", min=0, commands=_ALL, **_SERVING)
    ] = 30.0
    request_s: Annotated[float, about("How long a client may take to send its request.", "s", over=0)] = 30.0
    unread_s: Annotated[float, about("How long a client may not read what it was sent.", "s", over=0)] = 300.0
    access_log: Annotated[bool, about("A line in the frontend's log for every request.", commands=_ALL)] = False
    holds: Annotated[HoldSettings, about("Waits of streams and requests.", **_SERVING)] = HoldSettings()
    known: Annotated[KnownSettings, about("Models without a worker.", **_SERVING)] = KnownSettings()

    @property
    def serves(self) -> tuple[str, ...]:
        """The deployments whose workers it serves: its own first, and those that it says, no other."""
        return (self.deployment, *(one for one in self.shares if one != self.deployment))

    def check(self) -> None:
        """ValueError names what a process could not start with, of all that can be told without trying."""
        for address in filter(None, (self.address, self.status_address)):
            parse_address(address)
        for deployment in self.serves:
            check_deployment_name(deployment)
        if any(not split_key(key)[0].strip() for key in self.api_keys):
            raise ValueError("an API key is empty: that would let everyone in who sends none")


class ControlLaunch(StoredLaunch, frozen=True):
    """A control: of those of one deployment the one that has the lock decides."""

    status_address: Annotated[str, about(_STATUS, commands=("control",))] = "tcp://127.0.0.1:0"
    status_any: Annotated[
        bool, about("Where another has the status page's port, take any: it is a wish of ours, not of a person.")
    ] = False
    lock: Annotated[
        str,
        about(
            "The lock that elects the one that decides; default: in an etcd that is the store, else a file in the "
            "state directory.",
            commands=("control",),
        ),
    ] = ""
    lock_token: Annotated[str, about("The token of a lock server on TCP.")] = ""
    engine_token: Annotated[str, about("What workers on other machines ask for before they load weights anew.")] = ""
    events: Annotated[EventSettings, about("Who is told what happens.", panel="The fleet")] = EventSettings()
    health: Annotated[HealthSettings, about("How workers are judged.", panel="Health")] = HealthSettings()
    levels: Annotated[LevelSettings, about("What is promised, and kept in reserve.", panel="Health")] = LevelSettings()

    def check(self) -> None:
        """ValueError names what a process could not start with, of all that can be told without trying."""
        if self.status_address:
            parse_address(self.status_address)
        check_deployment_name(self.deployment)

    def elected_by(self) -> str:
        """The lock of whoever said none."""
        return self.lock or control_lock(self.state_dir, self.store, self.deployment)
