"""`holdfast up`: start, or adopt, one deployment on this machine, as its options say, and keep it running."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from holdfast import __version__
from holdfast.cli.api_keys import api_keys_in
from holdfast.cli.checks import check_engine, check_machine, check_store, made, own, settle_port
from holdfast.cli.fleet.manifest import wish_for
from holdfast.cli.fleet.written import ModelText
from holdfast.cli.keeping import keep, taken_lock
from holdfast.cli.models import prepare
from holdfast.cli.ps import look_at_all
from holdfast.cli.screen import Screen, chat_command, open_warning, show_up
from holdfast.control.redis_stream import check_redis
from holdfast.core.address import TcpAddress
from holdfast.core.errors import settled
from holdfast.core.tiers import split_key
from holdfast.memory.devices.host_room import free_host_bytes
from holdfast.roles.devices import choose, exact_note
from holdfast.roles.hosted import NodeSite
from holdfast.roles.model_names import NOTES
from holdfast.roles.planned import Planned
from holdfast.roles.running import log_dir
from holdfast.roles.starting import Doing, Start, follow
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import Launch, StoredLaunch
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
    """Run it; the exit status. UserError before anything is started. `tied`: in the foreground nothing outlives it.
    `node`: of a fleet, which this machine is then as well; `more`: processes besides those of `spec`; `models`: those
    that are wished for once it is up."""
    with settled():
        check_machine()
        check_store(spec.store)
        spec.check(state_dir)  # every wish is checked before anything is touched
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
        spec = _prepare(state_dir, spec)  # minutes, maybe: after all that is quick
        start = Start.of(state_dir, LocalProcesses(log_dir(state_dir)), [*plan(state_dir, spec), *more])
        planned = Planned(start, spec.wait_s, node)
        return keep(PlannedWish(Screen(), spec, planned, detach, tuple(models)), lock, detach=detach, tied=tied)
    finally:
        os.close(lock)


def _with_kept_keys(state_dir: Path, spec: DeploymentSpec) -> DeploymentSpec:
    """Return the deployment with the API keys of before, if its last supervisor was killed and this command has none: a
    variable that is missing in this shell must not open the port."""
    if spec.frontend.api_keys:
        return spec
    launches = (settings for record, settings in read_kept(state_dir) if record.role == "frontend")
    keys = next(filter(None, map(api_keys_in, launches)), ())
    if not keys:
        return spec
    Screen().line(
        "The API keys of the last `holdfast up` here still apply: this command was given none, and that one did not "
        "end properly. To serve without keys, run `holdfast down` first."
    )
    return structs.replace(spec, frontend=structs.replace(spec.frontend, api_keys=keys))


def _prepare(state_dir: Path, spec: DeploymentSpec) -> DeploymentSpec:
    """Memory that our own processes have, which may be adopted, is not counted as somebody else's."""
    ours = any(record.alive for record in read_records(state_dir))
    with settled():
        return prepare(spec, None if ours else free_host_bytes())


def choose_and_tell(engine: str, text: str, needed: int, exact: bool) -> tuple[str, ...]:
    """The GPUs that `--device` means here; on the screen what was left to us, and what `--exact` costs there."""
    chosen = choose(engine, text, needed)
    for note in filter(None, (chosen.note, exact_note(exact, chosen))):
        Screen().line(note, style="dim")
    return chosen.gpus


def already(state_dir: Path) -> str:
    """That somebody holds the lock, and what a person can do about it."""
    found = holder(state_dir)
    who = f" (pid {found.pid})" if found is not None and found.pid else ""
    what = f"{found.deployment} is " if found is not None and found.deployment else ""
    return (
        f"{what}already running{who} in {state_dir}: see `holdfast ps`, stop it with `holdfast down`, "
        "or set HOLDFAST_STATE_DIR to run another beside it"
    )


@dataclass(frozen=True, slots=True)
class PlannedWish:
    """A deployment by its options, and what `up` shows of it, in the foreground and detached alike."""

    screen: Screen
    spec: DeploymentSpec
    kept: Planned
    detached: bool
    models: tuple[ModelText, ...] = ()  # that are wished for once it is up

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
        url, key = web_address(address), split_key(keys[0])[0] if keys else ""
        private = self.screen.terminal.is_terminal
        chat = "" if spec.backend else chat_command(url, model, key, private=private)
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
            for told in await wish_for(store, spec.name, self.models):
                self.screen.line(told)


def starting(launches: Sequence[Launch]) -> str:
    return f"starting {', '.join(launch.name for launch in launches)} …"
