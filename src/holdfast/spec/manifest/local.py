"""Makes the launches of a pod's replica on one machine. No I/O.

A container that runs `holdfast worker`, `frontend` or `control` becomes that process. Its typed settings are taken as
they are; args and variables are parsed as for a command line. The vault container of a failover group becomes one vault
per device. Pods here share one network, one disk and one user, so the machine's addresses, ports and paths replace
those that the plan sets for a pod (`Container.planned`).

Always true: the same replica gives the same launches byte for byte; no two replicas share a socket, a lock or a vault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.core.address import TcpAddress
from holdfast.core.errors import Refused, UserError, refuse_user_errors
from holdfast.settings import Environment, read_environment
from holdfast.spec.arguments import HelpWanted
from holdfast.spec.canaries import is_text
from holdfast.spec.commands import asked, control_by, frontend_by, settings_from, worker_by
from holdfast.spec.deployment import DeviceSlot
from holdfast.spec.engines import REAL
from holdfast.spec.launch import FrontendLaunch, Launch, VaultLaunch, WorkerLaunch
from holdfast.spec.manifest.parts import GRACE_S
from holdfast.spec.manifest.pod import Container, Pod
from holdfast.spec.manifest.pods import LOCK, living, starting
from holdfast.spec.manifest.rules import PLANNED
from holdfast.spec.manifest.secrets import SecretSource, SecretValues
from holdfast.spec.manifest.typed import PLACED, in_manifest_names
from holdfast.spec.manifest.types import FRONTEND, WORKER
from holdfast.spec.names import check_process_name, own_page, room_for_socket, socket_path
from holdfast.spec.settings import S


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine's replacements for a pod's network, disk and devices."""

    state_dir: Path
    environ: Mapping[str, str]  # of the process that starts the containers, which inherit it
    store: str = ""  # empty: the embedded store
    vault_dir: str = ""  # directory of the vaults' sockets; empty: `gms` in the state directory
    host: str = "127.0.0.1"  # default listen address of frontends
    port: int = 8000
    status_host: str = "127.0.0.1"
    reach: str = ""  # host for frontends on other machines to reach its engines; empty: Unix sockets, local only
    secret_source: SecretSource | None = None  # None: containers start on another machine, with its secrets

    def addresses(self, name: str) -> dict[str, str]:
        """Return the listen addresses of an engine and of its heartbeat."""
        if self.reach:
            return dict.fromkeys(("address", "beat_address"), str(TcpAddress(self.reach, 0)))
        socket = f"unix://{self.state_dir}/run/{name}"
        return {"address": f"{socket}.sock", "beat_address": f"{socket}.beat"}

    @property
    def store_url(self) -> str:
        return self.store or f"unix://{self.state_dir}/run/store.sock"

    @property
    def vaults(self) -> Path:
        return Path(self.vault_dir) if self.vault_dir else self.state_dir / "gms"

    def environment(self, container: Container, replica: str) -> Environment:
        """Return the settings from a container's variables; raise ValueError if one is invalid."""
        planned = {variable.name: variable.value for variable in container.planned}
        here = {
            "DYN_HTTP_HOST": self.host,
            "DYN_HTTP_PORT": str(self.port),
            "DYN_SYSTEM_HOST": self.status_host,
            "DYN_SYSTEM_PORT": "0",
            "GMS_SOCKET_DIR": str(self.vaults),
        }
        said = planned | {name: value for name, value in here.items() if name in planned}
        if planned.get("FAILOVER_LOCK_PATH") == LOCK:
            said["FAILOVER_LOCK_PATH"] = f"flock://{self.state_dir}/run/{replica}.lock"
        starter = {name: value for name, value in self.environ.items() if name not in PLANNED}
        where = {"HOLDFAST_STATE_DIR": str(self.state_dir)}
        values = self.secrets_of(container)
        return read_environment({**starter, **values.inherited(), **said, **values.variables(), **where})

    def secrets_of(self, container: Container) -> SecretValues:
        return SecretValues(container, self.secret_source, self.environ, self.state_dir)


def replica_launches(pod: Pod, replica: str, slots: Sequence[DeviceSlot], machine: Machine) -> list[Launch]:
    """Return the processes of the replica with this name; raise Refused if one cannot run. `slots`: the devices of a
    failover group (`slots_needed`), or of a worker without failover that has a device."""
    with refuse_user_errors():
        return list(_launches(pod, replica, slots, machine))


def _launches(pod: Pod, replica: str, slots: Sequence[DeviceSlot], machine: Machine) -> Sequence[Launch]:
    if pod.component_type == WORKER:
        return [*_vaults(pod, replica, slots, machine), *_engines(pod, replica, slots, machine)]
    (container,) = pod.containers
    _check_name(replica, machine)
    kept = _kept(pod, container, machine)
    if pod.component_type == FRONTEND:
        return [replace(_frontend(container, replica, machine), **kept)]
    control = _asked(control_by(machine.environment(container, replica)), "control", container)
    return [replace(control, name=replica, status_any=True, store=machine.store_url, **kept)]


def slots_needed(pod: Pod, machine: Machine) -> tuple[int, bool]:
    """Return how many slots a replica needs (0 without failover), and whether they are on GPUs if the machine has any.
    A sim engine has one slot, in host memory."""
    if not pod.claims:
        return 0, False
    engine = worker_of(pod, machine).engine
    return (pod.claims[0].gpus if engine in REAL else 1, engine in REAL)


def worker_of(pod: Pod, machine: Machine) -> WorkerLaunch:
    """Return the settings of an engine of a worker's pod, without its slots; raise Refused if it cannot run."""
    with refuse_user_errors():
        launch = _worker(pod.containers[0], pod.name, machine)
        gpus = pod.claims[0].gpus if pod.claims else 1
        if launch.engine == "vllm" and gpus != launch.vllm.ranks:
            shares = f"--tensor-parallel-size {launch.vllm.ranks} shares the model between as many GPUs"
            raise Refused(f"{shares}, and this asks for {gpus}; make both the same")
        ranks = gpus if launch.engine == "torch" else 1
        return replace(launch, torch=replace(launch.torch, ranks=ranks), standbys=len(pod.containers) - 1)


def _vaults(pod: Pod, replica: str, slots: Sequence[DeviceSlot], machine: Machine) -> Iterator[VaultLaunch]:
    """Yield a vault for each device; the plan has one container for all."""
    if not pod.init:
        return
    env = machine.environment(pod.containers[0], replica)
    for rank, slot in enumerate(slots):
        yield VaultLaunch(
            state_dir=str(machine.state_dir),
            log_level=env.log_level,
            name=f"{replica}-vault" + (f"-r{rank + 1}" if rank else ""),
            deployment=env.deployment,
            device=slot.device,
            socket_path=socket_path(machine.vaults, slot.socket_name),
        )


def _engines(pod: Pod, replica: str, slots: Sequence[DeviceSlot], machine: Machine) -> Iterator[WorkerLaunch]:
    """Yield the engines that share the vaults' memory (the lock elects the active one); without vaults, one worker."""
    for container in pod.containers:
        name = f"{replica}-{container.name}" if pod.init else replica
        _check_name(name, machine)
        launch = replace(
            _worker(container, replica, machine),
            name=name,
            status_any=True,
            **machine.addresses(name),
            **_kept(pod, container, machine),
        )
        if pod.init:
            yield _with_vaults(launch, replica, slots, machine, len(pod.containers) - 1)
        else:  # it has no vault; the device only says where it runs
            yield replace(launch, failover=replace(launch.failover, device=slots[0].device)) if slots else launch


def _worker(container: Container, replica: str, machine: Machine) -> WorkerLaunch:
    launch = _asked(worker_by(machine.environment(container, replica)), "worker", container)
    if launch.engine in REAL and not container.claims:
        raise Refused(f"the {launch.engine} engine keeps its memory in a vault; enable failover")
    return replace(
        launch,
        store=machine.store_url,
        source=_inside(container.working_dir, launch.source),
        chat_template=_inside(container.working_dir, launch.chat_template, always=True),
        canary_prompts=_inside(container.working_dir, launch.canary_prompts, always=not is_text(launch.canary_prompts)),
    )


def _with_vaults(
    launch: WorkerLaunch, replica: str, slots: Sequence[DeviceSlot], machine: Machine, standbys: int
) -> WorkerLaunch:
    sockets = [(socket_path(machine.vaults, slot.socket_name), slot.device) for slot in slots]
    (socket, device), *others = sockets
    ranks = len(slots) if launch.engine == "torch" else 1
    return replace(
        launch,
        failover=replace(launch.failover, vault_socket=socket, device=device, more_vaults=tuple(others)),
        torch=replace(launch.torch, ranks=ranks),
        group=replica,
        standbys=standbys,
    )


def _frontend(container: Container, name: str, machine: Machine) -> FrontendLaunch:
    spec = _asked(frontend_by(machine.environment(container, name)), "frontend", container)
    return replace(
        spec.frontend,
        name=name,
        store=machine.store_url,
        address=str(TcpAddress(spec.host, spec.port)),
        status_address=own_page(machine.state_dir, name),
    )


def _asked(pattern: S, command: str, container: Container) -> S:
    """Return the settings of a container: its typed ones, or those of its command and args. Raise Refused if it does
    not run this command."""
    if container.settings:
        try:
            return settings_from(pattern, command, dict(container.settings))
        except UserError as error:
            raise Refused(in_manifest_names(str(error), command)) from error
    words = container.words
    if words[:2] != ("holdfast", command):
        shown = " ".join(words[:3])
        raise Refused(f"`{shown}` does not run on this machine; leave command out, or write [holdfast, {command}]")
    ours = takewhile(lambda word: word != "--", words)  # arguments after -- are for vLLM
    placed = [word for word in ours if word.partition("=")[0] in PLACED]
    if placed:
        raise Refused(f"{placed[0].partition('=')[0]} is for the plan to say; leave it out")
    try:
        return asked(pattern, command, words[2:])
    except HelpWanted:
        raise Refused("--help is for a person; leave it out") from None


def _kept(pod: Pod, container: Container, machine: Machine) -> dict[str, Any]:
    """Return probes, stop time and environment: the supervisor's defaults, unless the manifest sets other times."""
    (port,) = container.ports
    probes, live, start = Launch().probes, container.liveness, container.startup
    if live is not None and live != living(port):
        probes = replace(probes, period_s=live.period_s, timeout_s=live.timeout_s, failure_threshold=live.failures_max)
    if start is not None and start != starting(pod.component_type, port):
        probes = replace(probes, startup_s=start.bound_s)
    stop_s = pod.grace_s if pod.grace_s != GRACE_S else 0.0
    return {"probes": probes, "stop_s": stop_s, "env": tuple(machine.secrets_of(container).variables().items())}


def _inside(folder: str, path: str, *, always: bool = False) -> str:
    """Return the path, if it is relative, inside the container's directory. Without `always`, only a path that begins
    with ./ or ../ is relative: another text may be a model's name."""
    relative = path.startswith(("./", "../")) or (always and path and not path.startswith(("/", "~")))
    return str(Path(folder) / path) if folder and relative else path


def _check_name(name: str, machine: Machine) -> None:
    check_process_name(name)
    room = room_for_socket(machine.state_dir, f"run/{name}.chaos")
    if room is not None:
        raise Refused(
            f"{name} is too long a name for sockets in {machine.state_dir}; "
            f"set HOLDFAST_STATE_DIR to a directory of at most {room} bytes"
        )
