"""The commands that start something, and what they are asked for: `holdfast up`, and `worker`, `frontend`, `store` and
`control`, one process each in the foreground. Options come from the settings that the processes are started with
(`spec`).

A pod gives its engines an environment: `ENGINE_ID`, `GMS_SOCKET_DIR`, `FAILOVER_LOCK_PATH` and `DYN_SYSTEM_PORT` are
enough for an engine that has a standby: its vault is its device's in that directory, and whoever takes turns with the
same lock is of its group.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from msgspec.structs import replace

from holdfast.cli.api_keys import ApiKeyFile, keyed
from holdfast.cli.arguments import Asked, Filename
from holdfast.cli.checks import own
from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import Refused, settled
from holdfast.settings import Environment, handed_on
from holdfast.spec.commands import control_by, frontend_by, own_store, worker_by
from holdfast.spec.deployment import DeploymentSpec, check_state_dir, ranks_of
from holdfast.spec.launch import ControlLaunch, Launch, StoreLaunch, WorkerLaunch
from holdfast.spec.manifest.local import Machine
from holdfast.spec.names import group_of, own_page, socket_path
from holdfast.spec.settings import S, about

if TYPE_CHECKING:
    from holdfast.cli.fleet.written import ModelText


class Up(Asked, frozen=True):
    """`holdfast up`."""

    lasting: ClassVar[bool] = True

    config: Annotated[
        Path | None,
        about("TOML file with any of these options, e.g. port = 9000; the command line takes precedence.", short="-c"),
    ] = None
    file: Filename = None
    detach: Annotated[bool, about("Run in the background.", short="-d")] = False
    untied: Annotated[
        bool, about("Keep all processes running if this command is killed; the next `up` adopts them (for systemd).")
    ] = False
    spec: Annotated[DeploymentSpec, about("The deployment.")] = DeploymentSpec("")
    device: Annotated[
        str,
        about(
            "auto (a GPU if there is one), cpu, or GPUs: cuda-0,cuda-1 or their UUIDs, assigned to workers in turn.",
            panel="The torch and vllm engines",
        ),
    ] = "auto"
    api_key_file: ApiKeyFile = None

    @classmethod
    def of(cls, env: Environment) -> Self:
        plain = DeploymentSpec(env.deployment)
        told = {"engine_token": env.engine_token, "cache_dir": str(env.cache_dir), "canary_prompts": env.canary_prompts}
        return cls(
            spec=replace(
                plain,
                log_level=env.log_level,
                status_host=env.status_host,
                vault_dir=str(env.gms_socket_dir),
                worker=replace(plain.worker, source="", model="", **told),
                frontend=replace(plain.frontend, api_keys=env.api_keys),
                control=replace(plain.control, engine_token=env.engine_token),
            )
        )

    def run(self, env: Environment) -> int:
        if self.api_key_file is not None:
            return replace(self, api_key_file=None, spec=keyed(self.spec, self.api_key_file)).run(env)
        if self.file is not None and not self.spec.backend:
            return self._run_manifest(env)
        if self.spec.backend == "ray":
            from holdfast.cli.fleet_up import run_on_ray

            spec, models = self._fleet(env)
            return run_on_ray(env.state_dir, spec, self.detach, tied=not self.untied, models=models)
        if self.spec.backend:
            return self._run_node(env)
        from holdfast.cli.up import choose_and_tell, run_up
        from holdfast.roles.model_names import named
        from holdfast.roles.small_files import canary_text, template_path

        worker = self.spec.worker
        with settled():
            template, canaries = template_path(worker.chat_template), canary_text(worker.canary_prompts)
            source, model = named(worker.engine, worker.source, worker.model)
            worker = replace(worker, source=source, model=model, chat_template=template, canary_prompts=canaries)
            needed = self.spec.workers * ranks_of(worker)
            gpus = choose_and_tell(worker.engine, self.device, needed, worker.torch.exact)
        return run_up(env.state_dir, replace(self.spec, worker=worker, gpus=gpus), self.detach, tied=not self.untied)

    def _run_node(self, env: Environment) -> int:
        """A fleet's replicas are all the workers that there are: how many of its own, and of what, nobody may say."""
        from holdfast.cli.fleet_up import run_node
        from holdfast.cli.manifest_up import ALL
        from holdfast.roles.devices import choose

        spec, models = self._fleet(env)
        with settled():
            gpus = choose("torch", self.device, ALL).gpus
        spec, tied = replace(spec, gpus=gpus), not self.untied
        return run_node(env.state_dir, spec, self.detach, tied, models, secrets_dir=env.secrets_dir)

    def _fleet(self, env: Environment) -> tuple[DeploymentSpec, Sequence[ModelText]]:
        """As the options say and, with -f, the manifest; and the models that are wished for then."""
        if self.file is None:
            return self.spec, ()
        from holdfast.cli.deployments.files import said_in
        from holdfast.cli.fleet.manifest import fleet_spec, models_in
        from holdfast.supervise.secrets import SecretFiles

        spec = self.spec
        source = SecretFiles(env.state_dir, env.secrets_dir)
        machine = Machine(
            env.state_dir, handed_on(), store=spec.store, host=spec.host, port=spec.port, secret_source=source
        )
        written, models = models_in(said_in("up", self.file), machine)
        return fleet_spec(spec, written.manifest, machine), models

    def _run_manifest(self, env: Environment) -> int:
        from holdfast.cli.deployments.files import read_manifest, said_in
        from holdfast.cli.manifest_up import run_manifest
        from holdfast.roles.rolled import Site
        from holdfast.supervise.secrets import SecretFiles

        spec, environ, source = self.spec, handed_on(), SecretFiles(env.state_dir, env.secrets_dir)
        written = read_manifest(said_in("up", self.file), env.state_dir, environ, source)
        site = Site(
            state_dir=str(env.state_dir),
            manifest=written.text,
            environ=environ,
            secrets_dir=env.secrets_dir,
            store=spec.store,
            vault_dir=spec.vault_dir,
            host=spec.host,
            port=spec.port,
            status_host=spec.status_host,
            wait_s=spec.wait_s,
        )
        return run_manifest(written, site, self.device, detach=self.detach, tied=not self.untied)


class Worker(Asked, frozen=True):
    """`holdfast worker`."""

    launch: Annotated[WorkerLaunch, about("Settings of the worker.")] = WorkerLaunch()
    lock_token_file: Annotated[
        Path | None,
        about("File with the token for a lock server on TCP (default: $HOLDFAST_LOCK_TOKEN).", panel="Failover"),
    ] = None

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(worker_by(env))

    def run(self, env: Environment) -> int:
        from holdfast.cli.locks import read_token
        from holdfast.roles.model_names import named
        from holdfast.roles.small_files import canary_text, template_path

        launch = _unless_empty(self.launch, self.of(env).launch, "store", "address", "status_address", "lock")
        launch = _seated(launch, env)
        source, model = named(launch.engine, launch.source, launch.model)
        return run_foreground(
            replace(
                launch,
                source=source,
                model=model,
                chat_template=template_path(launch.chat_template),
                canary_prompts=canary_text(launch.canary_prompts),
                lock_token=read_token(self.lock_token_file, env.lock_token),
                beat_address=launch.beat_address or beside(launch.address, env.state_dir, launch.name),
            )
        )


class Frontend(Asked, frozen=True):
    """`holdfast frontend`: one of a deployment's, with the same options."""

    spec: Annotated[DeploymentSpec, about("The deployment it belongs to.")] = DeploymentSpec("")
    api_key_file: ApiKeyFile = None

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(frontend_by(env))

    def run(self, env: Environment) -> int:
        given = keyed(self.spec, self.api_key_file).frontend
        launch = _unless_empty(given, self.of(env).spec.frontend, "store")
        name = own_name(env.state_dir, "frontend", launch.name)
        address = str(TcpAddress(self.spec.host, self.spec.port))
        return run_foreground(
            replace(launch, name=name, address=address, status_address=own_page(env.state_dir, name))
        )


class Store(Asked, frozen=True):
    """`holdfast store`."""

    launch: Annotated[StoreLaunch, about("Settings of the store.")] = StoreLaunch()

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(StoreLaunch(state_dir=str(env.state_dir), log_level=env.log_level, name="store"))

    def run(self, env: Environment) -> int:
        name = own_name(env.state_dir, "store", self.launch.name)
        return run_foreground(replace(self.launch, name=name, address=self.launch.address or own_store(env)))


class Control(Asked, frozen=True):
    """`holdfast control`."""

    launch: Annotated[ControlLaunch, about("Settings of the control.")] = ControlLaunch()
    lock_token_file: Annotated[
        Path | None, about("File with the token for a lock server on TCP (default: $HOLDFAST_LOCK_TOKEN).")
    ] = None

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(control_by(env))

    def run(self, env: Environment) -> int:
        from holdfast.cli.locks import read_token

        launch = _unless_empty(self.launch, self.of(env).launch, "store", "status_address")
        return run_foreground(
            replace(
                launch,
                name=own_name(env.state_dir, "control", launch.name),
                lock_token=read_token(self.lock_token_file, env.lock_token),
            )
        )


def _unless_empty(said: S, plain: S, *names: str) -> S:
    """An option that is given and empty is a variable that was not set: it means what nothing said would mean."""
    return replace(said, **{name: getattr(plain, name) for name in names if not getattr(said, name)})


def own_name(state_dir: Path, role: str, name: str) -> str:
    """`name`, or the next free one of its role, claimed for this process; the state directory is made if need be."""
    from holdfast.roles.names import claim_name

    with settled():
        check_state_dir(state_dir)
        own(state_dir)
    return claim_name(state_dir, role, name)


def run_foreground(launch: Launch) -> int:
    from holdfast.cli.checks import check_machine, check_store
    from holdfast.roles.run import run

    with settled():
        check_machine()
        check_store(getattr(launch, "store", ""))
    return run(launch)


def _seated(launch: WorkerLaunch, env: Environment) -> WorkerLaunch:
    """With its name, and where it sits among the engines it takes turns with: what was not said follows from the
    lock."""
    from holdfast.memory.finding import device_name

    name, group, place = launch.name, launch.group, launch.place
    place = replace(place, device=device_name(place.device))
    if launch.lock:
        group = group or group_of(launch.lock, socket.gethostname())
        name = name or f"{group}-{place.engine_id}"
        place = replace(place, vault_socket=place.vault_socket or socket_path(env.gms_socket_dir, place.device))
    name = own_name(env.state_dir, "worker", name)
    return replace(launch, name=name, group=group, place=place, standbys=1 if launch.lock else 0)


def beside(address: str, state_dir: Path, name: str) -> str:
    """A heartbeat's address beside the worker's own: the same host, any port."""
    try:
        own_address = parse_address(address)
    except ValueError as error:
        raise Refused(f"--address: {error}") from error
    if isinstance(own_address, TcpAddress):
        return str(TcpAddress(own_address.host, 0))
    return f"unix://{state_dir}/run/{name}.beat"
