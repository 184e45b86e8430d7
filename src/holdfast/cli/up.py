"""`holdfast up` starts or adopts one deployment on this machine, as its options describe it, and keeps it running."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from msgspec import structs

from holdfast import __version__
from holdfast.cli.api_keys import first_key
from holdfast.cli.checks import check_engine, check_machine, check_store, made, own, settle_port
from holdfast.cli.fleet.manifest import deploy_all
from holdfast.cli.fleet.written import ModelText
from holdfast.cli.keeping import keep, taken_lock
from holdfast.cli.screen import Screen, chat_command, open_warning, show_up, works
from holdfast.cli.status import look_at_all
from holdfast.control.redis_stream import check_redis
from holdfast.core.address import TcpAddress
from holdfast.core.errors import HoldfastError, UserError, refuse_user_errors
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.memory.devices.host_room import free_host_bytes
from holdfast.roles.devices import choose, exact_note, sizes_of
from holdfast.roles.examining import Asked, examine, examine_sim, examine_vllm
from holdfast.roles.hosted import NodeSite
from holdfast.roles.model_names import NOTES, is_made
from holdfast.roles.planned import Planned
from holdfast.roles.running import log_dir
from holdfast.roles.starting import Doing, Start, follow
from holdfast.spec.deployment import DeploymentSpec, device_slots, pairs_on
from holdfast.spec.launch import Launch, RecordedLaunch, StoredLaunch
from holdfast.spec.plan import plan
from holdfast.supervise.lock import Holder, holder, sign
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import read_kept, read_records
from holdfast.supervise.status import web_address


def run_up(
    state_dir: Path,
    spec: DeploymentSpec,
    detach: bool,
    tied: bool = True,
    *,
    node: NodeSite | None = None,
    more: Sequence[Launch] = (),
    models: Sequence[ModelText] = (),
) -> int:
    """Run a deployment and return the exit status. Invalid settings raise UserError before anything starts. `tied`: in
    the foreground no process outlives this one. `node`: this machine as a node of a fleet; `more`: processes besides
    those of `spec`; `models`: deployed once it is up."""
    with refuse_user_errors():
        check_machine()
        check_store(spec.store)
        spec.check(state_dir)  # all options are checked before anything changes
        check_engine(spec.worker.engine)
        check_redis(spec.control.events.redis)
        own(state_dir)
        if spec.standbys and spec.vault_dir:
            made(Path(spec.vault_dir), "GMS_SOCKET_DIR")
    lock = taken_lock(state_dir, "", lambda: already(state_dir))
    try:
        sign(lock, Holder(os.getpid()))
        spec = _with_kept_keys(state_dir, spec)
        spec = structs.replace(spec, port=settle_port(spec.host, spec.port, state_dir))
        # Memory of our own running processes, which may be adopted, counts as free.
        ours = any(record.alive for record in read_records(state_dir))
        with refuse_user_errors():
            spec = prepare(spec, None if ours else free_host_bytes())  # may take minutes, so after all quick checks
        start = Start.of(state_dir, LocalProcesses(log_dir(state_dir)), [*plan(state_dir, spec), *more])
        planned = Planned(start, spec.wait_s, node)
        return keep(PlannedStartUp(Screen(), spec, planned, detach, tuple(models)), lock, detach=detach, tied=tied)
    finally:
        os.close(lock)


def _with_kept_keys(state_dir: Path, spec: DeploymentSpec) -> DeploymentSpec:
    """Return the deployment with the API keys of the last `up`, if its supervisor was killed and this command has none.
    A variable that is unset in this shell must not open the port."""
    if spec.frontend.api_keys:
        return spec
    launches = (settings for record, settings in read_kept(state_dir) if record.role == "frontend")
    keys = next(filter(None, (RecordedLaunch.of(one).api_keys for one in launches)), ())
    if not keys:
        return spec
    Screen().line(
        "The API keys of the last `holdfast up` here still apply: this command was given none, and that one did not "
        "end properly. To serve without keys, run `holdfast down` first."
    )
    return structs.replace(spec, frontend=structs.replace(spec.frontend, api_keys=keys))


def choose_and_tell(engine: str, text: str, needed: int, exact: bool) -> tuple[str, ...]:
    """Return the GPUs that `--device` means on this machine. Show which were chosen and what `--exact` costs there."""
    chosen = choose(engine, text, needed)
    for note in filter(None, (chosen.note, exact_note(exact, chosen))):
        Screen().line(note, style="dim")
    return chosen.gpus


def already(state_dir: Path) -> str:
    """Return the error that another process holds the lock, with the remedy."""
    found = holder(state_dir)
    pid = f" (pid {found.pid})" if found is not None and found.pid else ""
    what = f"{found.deployment} is " if found is not None and found.deployment else ""
    return (
        f"{what}already running{pid} in {state_dir}: see `holdfast status`, stop it with `holdfast down`, "
        "or set HOLDFAST_STATE_DIR to run another beside it"
    )


@dataclass(frozen=True, slots=True)
class PlannedStartUp:
    """A deployment from options and what `up` shows of it, in the foreground and detached."""

    screen: Screen
    spec: DeploymentSpec
    kept: Planned
    detached: bool
    models: tuple[ModelText, ...] = ()  # deployed once it is up

    @property
    def wait_s(self) -> float:
        return self.spec.wait_s

    @property
    def starting(self) -> str:
        return starting(self.kept.start.launches)

    async def follow(self, show: Callable[[Doing], None]) -> None:
        await follow(self.kept.start, LocalProcesses(log_dir(self.kept.state_dir)), show)

    async def show(self, lack: str = "") -> None:
        spec, model, keys = self.spec, self.spec.worker.model, self.spec.frontend.api_keys
        statuses = await look_at_all(self.kept.state_dir)
        what = f"model {model}" if spec.workers else "frontends only, no workers"
        if spec.backend:
            what = "a fleet on Ray" if spec.backend == "ray" else f"node {spec.node} of a fleet"
        title = f"Holdfast {__version__} is up: {what}, deployment {spec.name}"
        if lack:
            title = f"Holdfast {__version__} runs, but {lack}"
        address = str(TcpAddress(spec.host, spec.port))
        url = web_address(address)
        private = self.screen.terminal.is_terminal
        chat = "" if spec.backend else chat_command(url, model, first_key(keys), private=private)
        more = f"`holdfast deploy KEY --model …` adds a model; clients reach it at {url}." if spec.backend else ""
        show_up(
            self.screen,
            title,
            statuses,
            chat=chat,
            state_dir=self.kept.state_dir,
            detached=self.detached,
            note=NOTES.get(model, "") if spec.workers else "",
            warning=open_warning([address], keys),
            more=more,
        )
        if self.models and not lack:
            store = next(one.store for one in self.kept.start.launches if isinstance(one, StoredLaunch))
            for line in await deploy_all(store, spec.name, self.models):
                self.screen.line(line)


def starting(launches: Sequence[Launch]) -> str:
    return f"starting {', '.join(launch.name for launch in launches)} …"


# -- the model: fetched, with a progress bar, and examined

WORKS = {"fetch": "fetching", "check": "checking", "unpack": "unpacking"}
MODELS = (
    "give a directory with config.json and safetensors, a .gguf file, a Hub id (org/name), tiny (random weights), "
    "or nothing (SmolLM2)"
)


def check_text(tokenizer_json: bytes, template: str) -> None:
    """Check that frontends can use the model's tokenizer and template. Raise UserError if they cannot."""
    from holdfast.frontend.text.template import Templates
    from holdfast.frontend.text.tokenizer import TextTokenizer

    try:
        TextTokenizer(tokenizer_json)
        if template:
            Templates(datetime.now).get(template)
    except ValueError as error:
        raise UserError(f"the model's {error}") from error
    except HoldfastError as error:
        raise UserError(f"the model's chat template cannot be used: {error.message}") from error


def prepare(spec: DeploymentSpec, free_bytes: int | None) -> DeploymentSpec:
    """Fetch the model and check that it can be served, before anything starts. Return the deployment with the model's
    path; raise UserError if it cannot be served."""
    if spec.worker.engine == "sim":
        examine_sim(spec, free_bytes)
        return spec
    if spec.worker.engine == "vllm":
        return _prepare_vllm(spec, free_bytes)
    source = spec.worker.source
    what = source if is_hub_id(source) else "SmolLM2-135M-Instruct"
    with works() as tell:

        def progress(work: str, done: int, total: int | None) -> None:
            tell(f"{WORKS[work]} {what}", done, total)

        if is_hub_id(source):
            fetched = structs.replace(spec.worker, source=str(fetch_from_hub(source, progress)))
            spec = structs.replace(spec, worker=fetched)
        elif not is_made(source) and not Path(source).exists():
            raise UserError(f"--model {source} is not there; {MODELS}")
        looked_at = examine(Asked.of_deployment(spec, free_bytes), progress)
    check_text(looked_at.tokenizer_json, "" if spec.worker.chat_template else looked_at.chat_template or "")
    return spec


def _prepare_vllm(spec: DeploymentSpec, free_bytes: int | None) -> DeploymentSpec:
    """Prepare a model for vLLM, which serves more families than the torch engine."""
    worker = structs.replace(spec.worker, standbys=spec.standbys)
    where = {"workers": spec.workers}
    if gpus := spec.gpus:
        worker = structs.replace(worker, failover=structs.replace(worker.failover, device=gpus[0]))
        # GPUs are assigned round-robin, so no GPU has more workers than the first.
        pairs = pairs_on(device_slots(gpus, spec.workers, spec.ranks))
        free_bytes, where = None, {"workers": pairs, "gpu_bytes": sizes_of(gpus)[0]}
    with works() as tell:
        looked_at, plan = examine_vllm(
            worker, lambda work, done, total: tell(f"{WORKS[work]} {worker.source}", done, total), free_bytes, **where
        )
    Screen().line(plan.text(), style="dim")
    check_text(looked_at.text.tokenizer_json, "" if worker.chat_template else looked_at.text.chat_template or "")
    return structs.replace(spec, worker=structs.replace(spec.worker, source=str(looked_at.path)))
