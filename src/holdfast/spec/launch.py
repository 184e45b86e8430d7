"""Defines the settings of each role's processes as plain data. A supervisor records them, and starts processes from
them; a list of launches is one JSON text.

A launch with an empty `state_dir` is a pattern, from which `spec.plan` makes a deployment's processes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from holdfast.core.address import Address, TcpAddress, parse_address
from holdfast.core.tiers import split_key
from holdfast.spec.engines import FailoverSettings, SimSettings, TorchSettings, VllmSettings
from holdfast.spec.health import HealthSettings, LevelSettings
from holdfast.spec.names import check_deployment_name, control_lock, is_host, namespace_for, namespace_of
from holdfast.spec.settings import Settings, about
from holdfast.spec.waits import HoldSettings, KnownSettings

_BOTH = {"commands": ("up", "control")}
_SERVING, _FAILOVER = {"panel": "Serving"}, {"panel": "Failover"}
_ALL = ("up", "frontend")
_ENGINES = ("up", "worker", "deploy")
_NAMED = ("up", "worker")  # not `deploy`: in a fleet the model's key is its name
_LONE = ("worker", "frontend", "store", "control")
_STORED = ("worker", "frontend", "control")
_STATUS = "Address of /live, /health and /metrics (default: tcp://$DYN_SYSTEM_HOST:$DYN_SYSTEM_PORT)."
_EVERYWHERE = ("0.0.0.0", "::")  # listen on all interfaces


class Probes(Settings, frozen=True):
    """Settings of a process's probes; the startup limit is long enough for a large model."""

    # Users notice an outage of a second.
    period_s: Annotated[float, about("Time between probes.", "s", over=0)] = 1.0
    # A single failure may occur during a state change.
    failure_threshold: Annotated[int, about("Consecutive failures after which the probe counts as failed.", min=1)] = 3
    # A cold 8B engine needs 32 s (facts 9).
    startup_s: Annotated[float, about("Time limit from start to ready.", "s", min=0)] = 120.0
    timeout_s: Annotated[
        float, about("Time limit for an answer; a probe without an answer does not count.", "s", over=0)
    ] = 1.0


class EventSettings(Settings, frozen=True):
    redis: Annotated[
        str,
        about(
            "Redis that receives fleet events in the stream dispatcher:events: redis://HOST:PORT/DB, rediss:// or"
            " unix://PATH.",
            expert=("up",),
        ),
    ] = ""
    redis_entries_max: Annotated[
        int, about("Approximate number of entries kept in the Redis stream.", min=1, expert=True)
    ] = 10_000


class Launch(Settings, frozen=True):
    """Settings of every process and of its supervision."""

    state_dir: Annotated[str, about("State directory of the deployment: sockets, logs and records.")] = ""
    name: Annotated[
        str, about("Process name shown by `holdfast status` (default: the next free name).", commands=_LONE)
    ] = ""
    parent: Annotated[int, about("Process ID whose end also ends this process (0: none).")] = 0
    log_level: Annotated[str, about("Log level.", choices=("debug", "info", "warning", "error"))] = "info"
    probes: Annotated[Probes, about("How the supervisor probes it; a startup_s of 0 is replaced by its role's.")] = (
        Probes(startup_s=0.0)
    )
    stop_s: Annotated[float, about("Time from SIGTERM to SIGKILL (0: depends on its role).", "s", min=0)] = 0.0
    env: Annotated[tuple[tuple[str, str], ...], about("Environment variables added to the inherited ones.")] = ()


class StoreLaunch(Launch, frozen=True):
    address: Annotated[
        str, about("Listen address, unix:// or tcp:// (default: a socket in the state directory).", commands=("store",))
    ] = ""


class VaultLaunch(Launch, frozen=True):
    """Settings of a vault with its keeper, for one device."""

    deployment: Annotated[str, about("Deployment that it belongs to (empty: none).")] = ""
    device: Annotated[str, about("Device whose memory it keeps: host-1, or a GPU's UUID.")] = ""
    socket_path: Annotated[str, about("Path of the socket it listens on.")] = ""
    budget_bytes: Annotated[
        int, about("Maximum device memory, weights plus KV pool (0: all there is).", "bytes", min=0)
    ] = 0
    host_budget_bytes: Annotated[int, about("Maximum host memory for demoted weights (0: none).", "bytes", min=0)] = 0
    leased: Annotated[
        bool, about("Other replicas may use the device's memory while the weights are in host memory.")
    ] = False


class StoredLaunch(Launch, frozen=True):
    """Settings of processes that use a store."""

    store: Annotated[
        str,
        about(
            "Store to use, e.g. etcd://127.0.0.1:2379 (default: the embedded store in the state directory).",
            commands=_STORED,
            **_SERVING,
        ),
    ] = ""
    deployment: Annotated[
        str, about("Deployment name (default: $DYN_NAMESPACE, or local).", commands=_STORED, **_SERVING)
    ] = ""


class WorkerLaunch(StoredLaunch, frozen=True):
    engine: Annotated[
        str, about("Inference engine of a worker: torch, vllm, or sim (a simulator).", commands=_ENGINES)
    ] = "sim"
    model: Annotated[
        str,
        about(
            "Model name that clients use (default: the model's own).", flag="--served-name", commands=_NAMED, **_SERVING
        ),
    ] = "holdfast-sim"
    source: Annotated[
        str,
        about(
            "Model. torch: default (SmolLM2-135M), a directory, a .gguf file, a Hub id (org/name), tiny, "
            "random:8b; vllm: a directory or a Hub id; sim: any name.",
            flag="--model",
            commands=_ENGINES,
            **_SERVING,
        ),
    ] = "default"
    cache_dir: Annotated[str, about("Directory for downloaded models.")] = ""
    chat_template: Annotated[
        str,
        about(
            "Jinja file with the chat template, instead of the model's own.", commands=_ENGINES, expert=True, **_SERVING
        ),
    ] = ""
    canary_prompts: Annotated[
        str,
        about(
            "Canary prompts with their expected tokens: a JSON file, or the JSON itself.",
            commands=_ENGINES,
            expert=True,
            **_SERVING,
        ),
    ] = ""
    address: Annotated[str, about("Listen address for frontends; port 0 picks a free one.", commands=("worker",))] = (
        "tcp://127.0.0.1:0"
    )
    beat_address: Annotated[
        str,
        about(
            "Listen address of the heartbeat (default: a free port on the host of --address).",
            commands=("worker",),
            expert=True,
        ),
    ] = "tcp://127.0.0.1:0"
    status_address: Annotated[str, about(_STATUS, commands=("worker",))] = "tcp://127.0.0.1:0"
    status_any: Annotated[bool, about("Use any free port if the status page's port is taken.")] = False
    advertise: Annotated[
        str, about("Host that frontends connect to, if it listens on 0.0.0.0 or is behind NAT.", commands=("worker",))
    ] = ""
    # A worker hands its streams back in milliseconds; this bounds the wait for a frontend or store that does not
    # respond.
    drain_s: Annotated[
        float, about("Time limit for a graceful stop.", "s", min=0, commands=("worker",), expert=True, **_SERVING)
    ] = 5.0
    allow_chaos: Annotated[
        bool, about("Allow `holdfast chaos` to inject faults.", commands=_ENGINES, expert=("deploy",), **_SERVING)
    ] = False
    lock: Annotated[
        str,
        about("Lock that elects the active engine (default: $FAILOVER_LOCK_PATH).", commands=("worker",), **_FAILOVER),
    ] = ""
    lock_token: Annotated[str, about("Token for a lock server on TCP.")] = ""
    group: Annotated[
        str,
        about(
            "Name of the failover group: this engine and its standbys.", commands=("worker",), expert=True, **_FAILOVER
        ),
    ] = ""
    starting_ready: Annotated[bool, about("Report ready to probes while loading.")] = False
    # Set by a manifest: there all settings of the service identify the set, not only those that affect answers.
    set_hash: Annotated[
        str,
        about(
            "Hash of the set it belongs to (empty: computed from these settings).",
            like=(r"|[0-9a-f]{8}", "8 hex digits"),
        ),
    ] = ""
    component: Annotated[str, about("Component name in addresses, e.g. worker or worker-decode.")] = "worker"
    health_endpoints: Annotated[
        tuple[str, ...], about("Endpoints that must be healthy for /health to succeed, by name (none: all).")
    ] = ()
    engine_token: Annotated[
        str,
        about("Token that permits `POST /engine/…` from anywhere (empty: only local processes of this user or root)."),
    ] = ""
    core_dumps: Annotated[
        bool, about("Allow core dumps; they delay a failover.", commands=("worker",), expert=True, **_FAILOVER)
    ] = False
    # Used by the memory plan: other processes with memory on the device.
    standbys: Annotated[int, about("Standby engines on the same device.", min=0)] = 0
    device_pairs: Annotated[int, about("Number of workers that share the device.", min=1)] = 1
    gpus: Annotated[
        tuple[tuple[str, str], ...], about("PCI address and UUID of each GPU it uses (none: those of its vaults).")
    ] = ()
    failover: Annotated[FailoverSettings, about("Memory and failover of the engine.", **_FAILOVER)] = msgspec.field(
        default=FailoverSettings(), name="place"
    )
    sim: Annotated[
        SimSettings,
        about(
            "Settings of the sim engine.",
            prefix="sim-",
            panel="The sim engine",
            engines=("sim",),
            expert=True,
            commands=("worker", "deploy"),
        ),
    ] = SimSettings()
    torch: Annotated[
        TorchSettings, about("Settings of the torch engine.", panel="The torch engine", engines=("torch",))
    ] = TorchSettings()
    vllm: Annotated[VllmSettings, about("Settings of the vllm engine.", panel="The vllm engine", engines=("vllm",))] = (
        VllmSettings()
    )

    def check(self) -> None:
        """Raise ValueError if a setting is invalid; problems that appear only at the start of the process are not
        found."""
        for address in (self.address, self.beat_address):
            self.reached_at(parse_address(address))
        if self.status_address:
            parse_address(self.status_address)
        self.namespace()

    @property
    def kv_gib(self) -> float:
        """Return the size of a real engine's KV pool; 0: the device's default."""
        return (self.vllm if self.engine == "vllm" else self.torch).kv_gib

    def engine_failover(self) -> FailoverSettings:
        """Return the failover settings of its engine, with the worker's name."""
        return msgspec.structs.replace(self.failover, engine_name=self.name)

    def namespace(self) -> str:
        """Return the namespace of its instances; it is equal for all workers that give the same answers."""
        if self.set_hash:
            return namespace_of(self.deployment, self.set_hash)
        settings: dict[str, Any] = {"engine": self.engine, "model": self.model}
        own: dict[str, Settings] = {"sim": self.sim, "torch": self.torch, "vllm": self.vllm}
        settings |= {self.engine: own.get(self.engine)}
        if self.engine != "sim":  # a GPU rounds differently from a CPU
            settings |= {"source": self.source, "on": "cpu" if is_host(self.failover.device) else "gpu"}
        if self.chat_template:
            settings |= {"chat_template": self.chat_template}
        return namespace_for(self.deployment, msgspec.to_builtins(settings))

    def reached_at(self, address: Address) -> Address:
        """Return the address for other processes to connect to; raise ValueError if there is none."""
        if not isinstance(address, TcpAddress):
            return address
        if not self.advertise and address.host in _EVERYWHERE:
            raise ValueError(f"{address} is where to listen, not where to connect; say with --advertise HOST")
        return TcpAddress(self.advertise or address.host, address.port)


class FrontendLaunch(StoredLaunch, frozen=True):
    shares: Annotated[tuple[str, ...], about("Other deployments whose workers it serves, too.")] = ()
    address: Annotated[str, about("HTTP listen address.")] = "tcp://127.0.0.1:8000"
    status_address: Annotated[
        str, about("Address of its own status pages, as several frontends share a port (empty: only on that port).")
    ] = ""
    api_keys: Annotated[
        tuple[str, ...],
        about(
            "API key that clients must send, or KEY=TIER (premium, standard, best_effort); may be repeated. Also "
            "$HOLDFAST_API_KEYS.",
            flag="--api-key",
            commands=_ALL,
            **_SERVING,
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        about(
            "Web origin allowed to send requests from a browser (CORS), or '*'; may be repeated (default: none).",
            flag="--cors-origin",
            commands=_ALL,
            expert=("up",),
            **_SERVING,
        ),
    ] = ()
    body_bytes_max: Annotated[
        int, about("Maximum size of a request body.", "bytes", min=1, commands=("frontend",), expert=True)
    ] = 16 * 1024 * 1024
    drain_s: Annotated[
        float,
        about(
            "Time that running requests have to finish when the frontend stops.",
            "s",
            min=0,
            commands=_ALL,
            expert=True,
            **_SERVING,
        ),
    ] = 30.0
    request_s: Annotated[
        float, about("Time that a client has to send its request; more while data keeps arriving.", "s", over=0)
    ] = 30.0
    unread_s: Annotated[float, about("Disconnect a client that has read nothing for this long.", "s", over=0)] = 300.0
    access_log: Annotated[bool, about("Log a line for every request.", commands=_ALL, expert=("up",))] = False
    holds: Annotated[
        HoldSettings, about("Waiting times of streams and requests.", expert=True, commands=_ALL, **_SERVING)
    ] = HoldSettings()
    known: Annotated[KnownSettings, about("Models without a worker.", expert=True, commands=_ALL, **_SERVING)] = (
        KnownSettings()
    )

    @property
    def serves(self) -> tuple[str, ...]:
        """Return the deployments that it routes to: its own first, then `shares`."""
        return (self.deployment, *(one for one in self.shares if one != self.deployment))

    def check(self) -> None:
        """Raise ValueError if a setting is invalid; problems that appear only at the start of the process are not
        found."""
        for address in filter(None, (self.address, self.status_address)):
            parse_address(address)
        for deployment in self.serves:
            check_deployment_name(deployment)
        if any(not split_key(key)[0].strip() for key in self.api_keys):
            raise ValueError("an API key is empty: requests without a key would be let in")


class ControlLaunch(StoredLaunch, frozen=True):
    """Settings of a control. A deployment may have several; the one that holds the lock decides."""

    status_address: Annotated[str, about(_STATUS, commands=("control",))] = "tcp://127.0.0.1:0"
    status_any: Annotated[bool, about("Use any free port if the status page's port is taken.")] = False
    lock: Annotated[
        str,
        about(
            "Lock that elects the leading control (default: in the store if it is etcd, else a file in the state "
            "directory).",
            commands=("control",),
        ),
    ] = ""
    lock_token: Annotated[str, about("Token for a lock server on TCP.")] = ""
    engine_token: Annotated[
        str, about("Token sent to workers on other machines when they are asked to reload weights.")
    ] = ""
    events: Annotated[EventSettings, about("Where fleet events are sent.", panel="The fleet", **_BOTH)] = (
        EventSettings()
    )
    health: Annotated[HealthSettings, about("Health checks of workers.", panel="Health", expert=True, **_BOTH)] = (
        HealthSettings()
    )
    levels: Annotated[
        LevelSettings, about("Service level objectives, degradation and spares.", panel="Health", expert=True)
    ] = LevelSettings()

    def check(self) -> None:
        """Raise ValueError if a setting is invalid; problems that appear only at the start of the process are not
        found."""
        if self.status_address:
            parse_address(self.status_address)
        check_deployment_name(self.deployment)

    def elected_by(self) -> str:
        """Return the lock's address, with its default."""
        return self.lock or control_lock(self.state_dir, self.store, self.deployment)


class RayLaunch(StoredLaunch, frozen=True):
    """Settings of the process that runs a fleet's agents on the nodes of a Ray cluster."""

    address: Annotated[
        str, about("HOST:PORT of the Ray cluster's head (empty: the cluster running on this machine).")
    ] = ""
    environ: Annotated[
        tuple[tuple[str, str], ...], about("Environment variables of the starting process, passed on to replicas.")
    ] = ()
    device_bytes: Annotated[
        int,
        about(
            "Without GPUs: memory of each device (0: half of the free host memory, divided among the devices).",
            "bytes",
            min=0,
        ),
    ] = 0
    host_bytes: Annotated[
        int,
        about(
            "Host memory per node for weights of WARM replicas (-1: half of Ray's memory with GPUs, else none).",
            "bytes",
            min=-1,
        ),
    ] = -1


class RecordedLaunch(msgspec.Struct, frozen=True):
    """The fields of a process's launch that commands read, for any role and any version that wrote it."""

    address: str = ""
    group: str = ""
    api_keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: bytes | None) -> RecordedLaunch:
        try:
            return msgspec.json.decode(data or b"{}", type=cls)
        except msgspec.DecodeError:
            return cls()


ROLES: dict[str, type[Launch]] = {
    "store": StoreLaunch,
    "vault": VaultLaunch,
    "worker": WorkerLaunch,
    "frontend": FrontendLaunch,
    "control": ControlLaunch,
    "ray": RayLaunch,
}


def role_of(launch: Launch) -> str:
    return next(role for role, kind in ROLES.items() if isinstance(launch, kind))


def encode_launches(launches: list[Launch]) -> bytes:
    return msgspec.json.encode([(role_of(launch), launch) for launch in launches])


def decode_launches(data: bytes) -> list[Launch]:
    pairs = msgspec.json.decode(data, type=list[tuple[str, msgspec.Raw]])
    return [msgspec.json.decode(settings, type=ROLES[role]) for role, settings in pairs]
