"""`holdfast up -f FILE` runs a manifest's deployment on this machine, and updates it when `holdfast apply` changes
it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from holdfast import __version__
from holdfast.cli.api_keys import first_key
from holdfast.cli.checks import check_engine, check_machine, check_store, made, own, settle_port
from holdfast.cli.deployments.book import Book, opened
from holdfast.cli.deployments.files import Written
from holdfast.cli.keeping import keep, taken_lock
from holdfast.cli.screen import Screen, chat_command, open_warning, show_up
from holdfast.cli.status import look_around
from holdfast.cli.up import already, choose_and_tell
from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import UserError, refuse_user_errors
from holdfast.discovery.keys import ROLLOUT_STATUS
from holdfast.roles.devices import choose, sizes_of
from holdfast.roles.model_names import named
from holdfast.roles.rolled import Rolled, Site, goes_on
from holdfast.roles.starting import Doing
from holdfast.rollout.records import decode_status
from holdfast.spec.deployment import check_state_dir
from holdfast.spec.engines import REAL
from holdfast.spec.launch import FrontendLaunch, Launch, RecordedLaunch, WorkerLaunch
from holdfast.spec.manifest.whole import whole
from holdfast.supervise.job_list import kept_jobs
from holdfast.supervise.lock import Holder, holder, sign
from holdfast.supervise.records import read_launch
from holdfast.supervise.replicas import replica_id_of
from holdfast.supervise.status import web_address

ALL = 1024  # GPUs to choose: a later revision may need more than the first
LOOK_S = 0.2  # between updates of the progress display


def run_manifest(written: Written, site: Site, device: str, *, detach: bool, tied: bool) -> int:
    """Run a manifest's deployment and return the exit status. Invalid settings raise UserError before anything
    starts."""
    state_dir, name = Path(site.state_dir), written.manifest.name
    with refuse_user_errors():
        check_machine()
        check_store(site.store)
        check_state_dir(state_dir)
        own(state_dir)
        made(site.machine.vaults, "GMS_SOCKET_DIR")
    lock = taken_lock(state_dir, name, lambda: _already(state_dir, name))
    try:
        sign(lock, Holder(os.getpid(), deployment=name, store=site.machine.store_url))
        site = _with_secrets(written, site)
        with refuse_user_errors():
            launches, site = _on_devices(written, site, device)
        screen = Screen()
        site = _at_its_ports(name, site, launches, screen)
        return keep(ManifestStartUp(screen, Rolled(site), detach), lock, detach=detach, tied=tied)
    finally:
        os.close(lock)


def _with_secrets(written: Written, site: Site) -> Site:
    """Return the site with the hashes of the manifest's secrets. Add variables such as HOLDFAST_API_KEYS that an
    earlier `up` had and this one lacks. From now on the secrets' values are stored."""
    files = site.secret_files
    return replace(
        site,
        environ={**files.inherited(), **site.environ},
        secret_digests=files.digests(written.manifest, site.environ),
    )


def _already(state_dir: Path, name: str) -> str:
    found = holder(state_dir)
    if found is None or found.deployment != name:
        return already(state_dir)
    running = f"{name} runs already (pid {found.pid}) in {state_dir}"
    return f"{running}: change it with `holdfast apply -f FILE`; `holdfast get` shows it, `holdfast down` stops it"


def _on_devices(written: Written, site: Site, device: str) -> tuple[list[Launch], Site]:
    """Return the manifest's first processes, and the site with the GPUs that they may use."""
    launches = whole(written.manifest, site.machine, (), named)
    engines = {launch.engine for launch in launches if isinstance(launch, WorkerLaunch)}
    for engine in sorted(engines):
        check_engine(engine)
    if engines & set(REAL):
        gpus = choose_and_tell("torch", device, ALL, exact=False)
    else:
        gpus = choose("torch", device, ALL).gpus  # a later revision may need them
    site = replace(site, gpus=gpus, gpu_bytes=sizes_of(gpus))
    launches = whole(written.manifest, site.machine, gpus, named)
    shared = [launch.device_pairs for launch in launches if isinstance(launch, WorkerLaunch)]
    return launches, replace(site, sharing=max([1, *shared]))


def _at_its_ports(name: str, site: Site, launches: list[Launch], screen: Screen) -> Site:
    """Return the site with a free port for its frontends, unless their containers set one. Frontends that already run
    keep their port; new ones use the same."""
    state_dir, before = Path(site.state_dir), site.port
    ours = [job for job in kept_jobs(state_dir) if job.role == "frontend" and replica_id_of(job.name, name, ())]
    for job in ours[:1]:
        at = parse_address(RecordedLaunch.of(job.settings).address)
        if isinstance(at, TcpAddress) and (at.host, at.port) != (site.host, site.port):
            screen.line(f"its frontends go on at {web_address(str(at))}", style="dim")
            site = replace(site, host=at.host, port=at.port)
    site = replace(site, port=settle_port(site.host, site.port, state_dir))
    for launch in launches:
        own_at = parse_address(launch.address) if isinstance(launch, FrontendLaunch) else None
        if isinstance(own_at, TcpAddress) and own_at.port != before:
            settle_port(own_at.host, own_at.port, state_dir)
    return site


@dataclass(frozen=True, slots=True)
class ManifestStartUp:
    """A manifest's deployment and what `up` shows of it, in the foreground and detached."""

    screen: Screen
    kept: Rolled
    detached: bool

    @property
    def wait_s(self) -> float:
        return self.kept.site.wait_s

    @property
    def starting(self) -> str:
        services = self.kept.manifest.spec.services.items()
        return f"starting {self.kept.manifest.name}: {', '.join(f'{one.replicas} {name}' for name, one in services)} …"

    async def follow(self, show: Callable[[Doing], None]) -> None:
        async with opened(self.kept.machine.store_url) as book:
            while True:
                show(doing(self.kept.manifest.name, book))
                await asyncio.sleep(LOOK_S)

    async def show(self, lack: str = "") -> None:
        name, state_dir = self.kept.manifest.name, self.kept.state_dir
        looked = await look_around(state_dir)
        frontends = [
            (one, RecordedLaunch.of(read_launch(state_dir, one.name)).api_keys)
            for one in looked.statuses
            if one.role == "frontend" and one.address
        ]
        chat = ""
        for status, keys in frontends[:1]:
            models = looked.pages.get(status.name, {}).get("models") or ["MODEL"]
            private = self.screen.terminal.is_terminal
            chat = chat_command(web_address(status.address), models[0], first_key(keys), private=private)
        title = f"Holdfast {__version__} runs {name}, but {lack}" if lack else f"Holdfast {__version__} is up: {name}"
        more = "Change it with `holdfast apply -f FILE`; `holdfast get` and `holdfast rollout status` show how it is."
        show_up(
            self.screen,
            title,
            looked.statuses,
            chat=chat,
            state_dir=state_dir,
            detached=self.detached,
            warning=open_warning(one.address for one, keys in frontends if not keys),
            more=more,
        )
        if self.detached and not lack:
            await self._show_what_goes_on()

    async def _show_what_goes_on(self) -> None:
        """Show a note if an earlier revision continues: a detached supervisor writes this only to its log. If the store
        cannot be read, show nothing."""
        seen = None
        with contextlib.suppress(UserError):
            async with opened(self.kept.machine.store_url) as book:
                await book.whole()
                seen = book.seen(self.kept.manifest.name)
        if seen is not None and (note := goes_on(seen.wanted, self.kept.manifest, self.kept.site.secret_digests)):
            self.screen.line(f"\n{note}", style="yellow")


def doing(name: str, book: Book) -> dict[str, str]:
    status = decode_status(book.values.get(ROLLOUT_STATUS + name))
    if status is None:
        return {name: "waiting for the store"}
    if status.trouble or status.report is None:
        return {name: status.trouble or "about to begin"}
    late = [one for one in status.report.services if not one.new == one.wanted == one.there]
    return {one.name: str(one).partition(": ")[2] for one in late}
