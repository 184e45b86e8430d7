"""Implements the commands that start processes: `holdfast up`, and `holdfast run worker`, `frontend`, `store`,
`control` and `lock`, which run one process each in the foreground. Their options are the processes' settings (`spec`).

In a pod the environment is enough for an engine with a standby: `ENGINE_ID`, `GMS_SOCKET_DIR`, `FAILOVER_LOCK_PATH` and
`DYN_SYSTEM_PORT`. The engine uses the vault of its device in that directory, and engines with the same lock are one
group.
"""

from __future__ import annotations

import logging
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from msgspec.structs import replace

from holdfast.cli.api_keys import ApiKeyFile, keyed
from holdfast.cli.arguments import CommandOptions, Filename
from holdfast.cli.checks import own
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import Refused, UserError, refuse_user_errors
from holdfast.settings import Environment, handed_on
from holdfast.spec.arguments import WORDS, Options, kind_of, meant, takes_many
from holdfast.spec.commands import control_by, frontend_by, own_store, worker_by
from holdfast.spec.deployment import DeploymentSpec, check_state_dir, ranks_of
from holdfast.spec.launch import ControlLaunch, Launch, StoreLaunch, WorkerLaunch
from holdfast.spec.manifest.local import Machine
from holdfast.spec.names import group_of, own_page, socket_path
from holdfast.spec.settings import S, Setting, about

if TYPE_CHECKING:
    from holdfast.cli.fleet.written import ModelText


CONFIG = "--config"  # the only option not allowed in the file of `-c`
CONFIG_NEAR = 0.5  # minimum similarity of a suggested option


class UpCommand(CommandOptions, frozen=True):
    lasting: ClassVar[bool] = True

    config: Annotated[
        Path | None,
        about("TOML file with any of these options, e.g. port = 9000; the command line takes precedence.", short="-c"),
    ] = None
    file: Filename = None
    detach: Annotated[bool, about("Run in the background.", short="-d")] = False
    untied: Annotated[
        bool,
        about(
            "Keep all processes running if this command is killed; the next `up` adopts them (for systemd).",
            expert=True,
        ),
    ] = False
    dry_run: Annotated[
        bool, about("Print these options as a manifest for `up -f`; start nothing.", flag="--dry-run")
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
        given = {
            "engine_token": env.engine_token,
            "cache_dir": str(env.cache_dir),
            "canary_prompts": env.canary_prompts,
        }
        return cls(
            spec=replace(
                plain,
                log_level=env.log_level,
                status_host=env.status_host,
                vault_dir=str(env.gms_socket_dir),
                worker=replace(plain.worker, source="", model="", **given),
                frontend=replace(plain.frontend, api_keys=env.api_keys),
                control=replace(plain.control, engine_token=env.engine_token),
            )
        )

    def run(self, env: Environment) -> int:
        if self.api_key_file is not None:
            return replace(self, api_key_file=None, spec=keyed(self.spec, self.api_key_file)).run(env)
        if self.file is not None and not self.spec.backend:
            return self._run_manifest(env)
        if self.dry_run:
            return self._show_manifest(env)
        if self.spec.backend == "ray":
            from holdfast.cli.fleet_up import run_on_ray

            spec, models = self._fleet(env)
            return run_on_ray(env.state_dir, spec, self.detach, tied=not self.untied, models=models)
        if self.spec.backend:
            return self._run_node(env)
        from holdfast.cli.up import choose_and_tell, run_up

        with refuse_user_errors():
            worker = self._worker()
            needed = self.spec.workers * ranks_of(worker)
            gpus = choose_and_tell(worker.engine, self.device, needed, worker.torch.exact)
        return run_up(env.state_dir, replace(self.spec, worker=worker, gpus=gpus), self.detach, tied=not self.untied)

    def _worker(self) -> WorkerLaunch:
        """Return the worker's settings with the model's source and name, and with whole paths."""
        from holdfast.roles.model_names import named
        from holdfast.roles.small_files import canary_text, template_path

        worker = self.spec.worker
        template, canaries = template_path(worker.chat_template), canary_text(worker.canary_prompts)
        source, model = named(worker.engine, worker.source, worker.model)
        return replace(worker, source=source, model=model, chat_template=template, canary_prompts=canaries)

    def _show_manifest(self, env: Environment) -> int:
        """Print the manifest of these options, after the command that runs it here with the machine's options."""
        from holdfast.spec.manifest.from_options import manifest_from, text_from

        with refuse_user_errors():
            spec = replace(self.spec, worker=self._worker())
            spec.check(env.state_dir)
            manifest_from(spec)
        here = {"--store": spec.store, "--device": self.device if self.device != "auto" else ""}
        words = "".join(f" {flag} {shlex.quote(value)}" for flag, value in here.items() if value)
        keys = f"# with the API keys in $HOLDFAST_API_KEYS or {env.secrets_dir}/{spec.name}/HOLDFAST_API_KEYS\n"
        write_out(f"# holdfast up -f FILE{words}\n{keys if spec.frontend.api_keys else ''}{text_from(spec)}")
        return 0

    def _run_node(self, env: Environment) -> int:
        """Run a fleet's first node. Options about workers do not apply: in a fleet all workers are replicas."""
        from holdfast.cli.fleet_up import run_node
        from holdfast.cli.manifest_up import ALL
        from holdfast.roles.devices import choose

        spec, models = self._fleet(env)
        with refuse_user_errors():
            gpus = choose("torch", self.device, ALL).gpus
        spec, tied = replace(spec, gpus=gpus), not self.untied
        return run_node(env.state_dir, spec, self.detach, tied, models, secrets_dir=env.secrets_dir)

    def _fleet(self, env: Environment) -> tuple[DeploymentSpec, Sequence[ModelText]]:
        """Return the deployment from the options and, with -f, the manifest; and the models to deploy once it is up."""
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
        if self.dry_run:
            write_out(written.text)
            return 0
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


class WorkerCommand(CommandOptions, frozen=True):
    launch: Annotated[WorkerLaunch, about("Settings of the worker.")] = WorkerLaunch()
    lock_token_file: Annotated[
        Path | None,
        about("File with the token for a lock server on TCP (default: $HOLDFAST_LOCK_TOKEN).", panel="Failover"),
    ] = None

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(worker_by(env))

    def run(self, env: Environment) -> int:
        from holdfast.roles.model_names import named
        from holdfast.roles.small_files import canary_text, template_path

        launch = _unless_empty(self.launch, self.of(env).launch, "store", "address", "status_address", "lock")
        launch = _with_failover(launch, env)
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


class FrontendCommand(CommandOptions, frozen=True):
    """Runs `holdfast run frontend`: one frontend of a deployment, with the deployment's options."""

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
        return run_foreground(replace(launch, name=name, address=address, status_address=own_page(env.state_dir, name)))


class StoreCommand(CommandOptions, frozen=True):
    launch: Annotated[StoreLaunch, about("Settings of the store.")] = StoreLaunch()

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(StoreLaunch(state_dir=str(env.state_dir), log_level=env.log_level, name="store"))

    def run(self, env: Environment) -> int:
        name = own_name(env.state_dir, "store", self.launch.name)
        return run_foreground(replace(self.launch, name=name, address=self.launch.address or own_store(env)))


class ControlCommand(CommandOptions, frozen=True):
    launch: Annotated[ControlLaunch, about("Settings of the control.")] = ControlLaunch()
    lock_token_file: Annotated[
        Path | None, about("File with the token for a lock server on TCP (default: $HOLDFAST_LOCK_TOKEN).")
    ] = None

    @classmethod
    def of(cls, env: Environment) -> Self:
        return cls(control_by(env))

    def run(self, env: Environment) -> int:
        launch = _unless_empty(self.launch, self.of(env).launch, "store", "status_address")
        return run_foreground(
            replace(
                launch,
                name=own_name(env.state_dir, "control", launch.name),
                lock_token=read_token(self.lock_token_file, env.lock_token),
            )
        )


def _unless_empty(said: S, plain: S, *names: str) -> S:
    """Return the options with empty values replaced by those of `plain`: an unset shell variable counts as not
    given."""
    return replace(said, **{name: getattr(plain, name) for name in names if not getattr(said, name)})


def own_name(state_dir: Path, role: str, name: str) -> str:
    """Claim `name`, or the next free name of its role, for this process and return it. Create the state directory if it
    is missing."""
    from holdfast.roles.names import claim_name

    with refuse_user_errors():
        check_state_dir(state_dir)
        own(state_dir)
    return claim_name(state_dir, role, name)


def run_foreground(launch: Launch) -> int:
    from holdfast.cli.checks import check_machine, check_store
    from holdfast.roles.run import run

    with refuse_user_errors():
        check_machine()
        check_store(getattr(launch, "store", ""))
    return run(launch)


def _with_failover(launch: WorkerLaunch, env: Environment) -> WorkerLaunch:
    """Return the launch with name, group and failover settings; what was not given is derived from the lock."""
    from holdfast.memory.devices import device_name

    name, group, failover = launch.name, launch.group, launch.failover
    failover = replace(failover, device=device_name(failover.device))
    if launch.lock:
        group = group or group_of(launch.lock, socket.gethostname())
        name = name or f"{group}-{failover.engine_id}"
        failover = replace(
            failover, vault_socket=failover.vault_socket or socket_path(env.gms_socket_dir, failover.device)
        )
    name = own_name(env.state_dir, "worker", name)
    return replace(launch, name=name, group=group, failover=failover, standbys=1 if launch.lock else 0)


def beside(address: str, state_dir: Path, name: str) -> str:
    """Return the address for a worker's heartbeat: on TCP the worker's host and any port, else a Unix socket."""
    try:
        own_address = parse_address(address)
    except ValueError as error:
        raise Refused(f"--address: {error}") from error
    if isinstance(own_address, TcpAddress):
        return str(TcpAddress(own_address.host, 0))
    return f"unix://{state_dir}/run/{name}.beat"


# -- `holdfast run lock`


class LockCommand(CommandOptions, frozen=True):
    address: Annotated[
        str, about("Listen address, unix:///path or tcp://host:port (default: a socket in the state directory).")
    ] = ""
    state_file: Annotated[
        Path | None, about("File that records the lock's holder (default: in the state directory).")
    ] = None
    window_s: Annotated[
        float, about("Time after a restart during which only the last holder can take the lock again.", "s")
    ] = 3.0
    token_file: Annotated[
        Path | None, about("File with the token that clients must send (default: $HOLDFAST_LOCK_TOKEN).")
    ] = None

    def run(self, env: Environment) -> int:
        import asyncio

        run = env.state_dir / "run"
        if not (self.address and self.state_file):
            own(env.state_dir)
            run.mkdir(exist_ok=True, mode=0o700)
        logging.basicConfig(level=env.log_level.upper(), format="%(asctime)s lock %(levelname)s %(message)s")
        where = self.address or f"unix://{run}/lock.sock"
        file = (self.state_file or run / "lock.state").absolute()
        try:
            asyncio.run(_serve(where, file, self.window_s, read_token(self.token_file, env.lock_token)))
        except ValueError as error:
            raise UserError(str(error)) from error
        return 0


async def _serve(where: str, state_file: Path, window_s: float, token: str) -> None:
    import asyncio

    from holdfast.core.tasks import done_before
    from holdfast.failover.lock_server.server import serve_lock
    from holdfast.wire.net import real_world

    address = parse_address(where)
    if isinstance(address, TcpAddress) and not token:
        mend = "give --token-file or $HOLDFAST_LOCK_TOKEN"
        raise UserError(f"any client that can reach {where} could take the lock: {mend}")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = serve_lock(
        address,
        state_file,
        window_s=window_s,
        token=token,
        world=real_world(),
        on_ready=lambda bound: Terminal().line(f"ready: --lock lock+{bound} (Ctrl-C ends it)"),
    )
    if not await done_before(stop, serving, "lock server"):
        print("stopped; the holder keeps the lock if the server is back within the window", file=sys.stderr)


def read_token(path: Path | None, default: str = "") -> str:
    """Return the token in the file without its line end. Raise UserError if it is empty."""
    if path is None:
        return default
    from holdfast.roles.small_files import read_small

    try:
        token = read_small(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {path} cannot be read: {error}") from error
    if not token:
        raise UserError(f"the token file {path} is empty")
    return token


# -- `holdfast up -c FILE`


def read_config(file: Path, options: Options) -> dict[str, Any]:
    """Return the options in a TOML file, by flag. Raise Refused for an unknown key or an invalid value; the error names
    the file, the key and, if one is similar, the option that was probably meant."""
    known = {flag.removeprefix("--"): one for flag, one in options.items() if flag != CONFIG}
    found = {}
    for word, value in _load(file).items():
        if isinstance(value, dict):
            path = ".".join([word, *list(value)[:1]])
            raise Refused(f"{file}: {path}: there are no tables; {_option_meant(path.rpartition('.')[2], known)}")
        if word not in known:
            raise Refused(f"{file}: {word}: there is no such option of `holdfast up`; {_option_meant(word, known)}")
        found[f"--{word}"] = _checked(f"{file}: {word}", known[word], value)
    return found


def _load(file: Path) -> dict[str, Any]:
    import tomllib

    from holdfast.roles.small_files import read_small

    try:
        return tomllib.loads(read_small(file).decode())
    except OSError as error:
        raise Refused(f"-c {file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise Refused(f"{file} is not TOML: {error}") from error


def _option_meant(word: str, known: dict[str, Setting]) -> str:
    wanted = word.replace("_", "-").removeprefix("--")
    names = [wanted] if wanted in known else known
    return meant(wanted, names, "`holdfast up --help-all` lists them, and the file has them without --", CONFIG_NEAR)


def _checked(where: str, setting: Setting, value: Any) -> Any:
    """Return the value as the command line would parse it."""
    values = value if takes_many(setting) and isinstance(value, list) else [value]
    lists = ", or a list of them" if takes_many(setting) else ""
    for one in values:
        if not _is_kind(one, kind_of(setting)):
            raise Refused(f"{where} must be {WORDS[kind_of(setting)]}{lists}, got {one!r}")
        if wrong := setting.wrong(one):
            raise Refused(f"{where} must be {wrong}{lists}, got {one!r}")
    made = [kind_of(setting)(one) for one in values]
    return tuple(made) if takes_many(setting) else made[0]


def _is_kind(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else int if kind is int else str)
