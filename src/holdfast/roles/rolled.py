"""A manifest's deployment kept on this machine: a store and a control, and replicas as its rollouts ask for them.

The manifest that it is begun with is only the first wish: what should run stands in the store, and whoever keeps the
deployment next goes on with that. So a file that differs from what the store holds changes nothing, and is told of; but
where no revision was ever in place there is nothing to go on with, and the file is the next one.

Always true: one process carries a deployment out, by the state directory's lock here and by its leased word in the
store elsewhere; what an earlier one kept running here, dead or alive, is among the first jobs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast.core.errors import Refused, UserError
from holdfast.core.ports import SystemClock
from holdfast.core.tasks import beside
from holdfast.roles.engines import memory_needed
from holdfast.roles.model_names import named
from holdfast.roles.planned import LOOK_S, hopeless, is_refused
from holdfast.roles.running import Shown, Tell, begin
from holdfast.rollout.records import (
    AskedManifest,
    DesiredDeployment,
    OwnedElsewhere,
    RolloutStatus,
    StateWriter,
    applied,
    change_desired,
    read_desired,
    read_status,
)
from holdfast.rollout.status import RolloutResult
from holdfast.spec.jobs import Job
from holdfast.spec.launch import Launch, StoreLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.types import PLANNER, Manifest
from holdfast.spec.manifest.whole import control_of
from holdfast.store.contract import Store, StoreUnavailable
from holdfast.store.opening import open_store
from holdfast.supervise.job_list import JobList, kept_jobs
from holdfast.supervise.leftovers import clear
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Phase
from holdfast.supervise.own_control import OwnControl
from holdfast.supervise.replicas import StartContext, replica_id_of
from holdfast.supervise.rollout_controller import RolloutController
from holdfast.supervise.secrets import SecretFiles
from holdfast.wire.net import SocketNetwork


class Site(Struct, frozen=True, kw_only=True):
    """A manifest, and this machine as its containers find it."""

    state_dir: str
    manifest: str  # its text
    environ: dict[str, str]  # of whoever starts it: containers have it, too
    secret_digests: dict[str, str] = {}  # hashes of the values of the manifest's secrets, which are kept in `state_dir`
    secrets_dir: str = ""  # empty: `secrets` in the state directory
    store: str = ""  # empty: our own
    vault_dir: str = ""  # empty: `gms` in the state directory
    host: str = "127.0.0.1"
    port: int = 8000
    status_host: str = "127.0.0.1"
    gpus: tuple[str, ...] = ()
    gpu_bytes: tuple[int, ...] = ()  # of each GPU; 0, or none: nobody knows
    sharing: int = 1  # workers of one GPU
    hosts: int = 0  # devices in host memory, which a simulator has in place of GPUs; 0: as many as are asked for
    host_bytes: int = 0  # of each; 0: what there is
    wait_s: float = 7200.0  # until it serves

    @property
    def has_bytes(self) -> dict[str, int]:
        """What replicas may have together of each device, where that is known."""
        known = {f"host-{number + 1}": self.host_bytes for number in range(self.hosts) if self.host_bytes}
        if any(self.gpu_bytes):
            from holdfast.engines.torch.memory_plan import usable_bytes  # loads numpy

            sizes = zip(self.gpus, self.gpu_bytes, strict=True)
            known |= {gpu: usable_bytes(size) for gpu, size in sizes if size}
        return known

    @property
    def machine(self) -> Machine:
        return Machine(
            Path(self.state_dir),
            self.environ,
            self.store,
            self.vault_dir,
            self.host,
            self.port,
            self.status_host,
            secret_source=self.secret_files,
        )

    @property
    def secret_files(self) -> SecretFiles:
        return SecretFiles(Path(self.state_dir), self.secrets_dir)


class Rolled:
    """One manifest's deployment, for as long as it is kept."""

    kind = "rolled"

    def __init__(self, site: Site) -> None:
        manifest = check(site.manifest.encode()).manifest
        assert manifest is not None, "whoever asks for it has checked it"
        self.site, self.manifest, self.machine = site, manifest, site.machine
        self.rolling: RolloutController | None = None  # once it is begun
        self._clock = SystemClock()
        self._place = RolloutStatus(pid=os.getpid(), host=os.uname().nodename, state_dir=site.state_dir)

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.site)

    @classmethod
    def decoded(cls, data: bytes) -> Rolled:
        return cls(msgspec.json.decode(data, type=Site))

    @property
    def state_dir(self) -> Path:
        return self.machine.state_dir

    def jobs(self) -> list[Job]:
        """Return the store, the supervisor's own control where the manifest has no planner or an earlier supervisor
        kept one, and every replica that an earlier supervisor kept."""
        own: list[Launch] = []
        if not self.site.store:
            own.append(StoreLaunch(state_dir=self.site.state_dir, name="store", address=self.machine.store_url))
        name, control = self.manifest.name, control_of(self.manifest.name, self.machine)
        kept = [job for job in kept_jobs(self.state_dir) if job.deployment == name]
        planners = self.manifest.of_type(PLANNER).values()
        if control.name in {job.name for job in kept} or not any(planner.replicas for planner in planners):
            own.append(control)
        return [*map(Job.of, own), *(job for job in kept if replica_id_of(job.name, name, ()))]

    async def run(self, supervisor: Supervisor, *, tied: bool, shown: Shown, tell: Tell) -> None:
        self.machine.vaults.mkdir(parents=True, exist_ok=True, mode=0o700)
        await begin(supervisor, tied=tied)
        supervisor.start_late()
        store = open_store(self.machine.store_url, SocketNetwork(), random.Random())
        await store.start()
        try:
            try:
                await self._has_store(supervisor)
                await self._ask(store, tell)
            except UserError as error:
                if not supervisor.adopted:
                    raise
                await shown(str(error))  # what runs goes on as it is
                await asyncio.Event().wait()
            await self._roll(store, supervisor, shown, tell)
        finally:
            await store.close()

    # -- what should run

    async def _has_store(self, supervisor: Supervisor) -> None:
        """Returns when our own store runs, or might yet; UserError says why it never will."""
        own = [slot for slot in supervisor.slots.values() if slot.job.role == "store"]
        await supervisor.wait(
            lambda: all(slot.life.phase is Phase.READY for slot in own) or bool(hopeless(own)), self.site.wait_s
        )
        if lack := hopeless(own):
            raise Refused(lack) if is_refused(supervisor) else UserError(lack)

    async def _ask(self, store: Store, tell: Tell) -> None:
        """UserError says why nothing can be asked for."""
        until_s, told = self._clock.monotonic_s() + self.site.wait_s, False
        while True:
            try:
                await self._asked(store, tell)
            except StoreUnavailable as error:
                if self._clock.monotonic_s() > until_s:
                    raise UserError(str(error)) from error
                if not told:
                    tell(f"{self.manifest.name}: {error}")
                told = True
            else:
                return

    async def _asked(self, store: Store, tell: Tell) -> None:
        name, now_s = self.manifest.name, self._clock.unix_s()
        other = await read_status(store, name)
        if other is not None and not other.is_at(self._place):
            raise UserError(f"{name} is carried out by {other}; change it with `holdfast apply`, or stop that first")
        memory = await StateWriter(store, name).open(now_s)
        held = await read_desired(store, name)
        if held is None or (memory.stable is None and not held.deleted):
            digests = self.site.secret_digests
            asked = AskedManifest.of(self.site.manifest, self.manifest, digests)
            await change_desired(store, name, applied(asked, now_s, cause="up"))
            self.site.secret_files.asked_with(digests)
        elif told := goes_on(held, self.manifest, self.site.secret_digests):
            tell(told)

    # -- its rollouts

    async def _roll(self, store: Store, supervisor: Supervisor, shown: Shown, tell: Tell) -> None:
        name, site = self.manifest.name, self.site
        context = StartContext(
            self.machine, site.gpus, named, site.sharing, site.hosts, has_bytes=site.has_bytes, needs=memory_needed
        )
        job_list = JobList(supervisor, self.state_dir)
        control = OwnControl(Job.of(control_of(name, self.machine)), supervisor, job_list)
        rolling = self.rolling = RolloutController(
            name, store, supervisor, job_list, context, status=self._place, tell=tell, control=control
        )
        async with beside(rolling.run(), "rollouts") as task:
            lack = await self._until_up(rolling, task)
            if lack and rolling.state.stable is None and not supervisor.adopted:
                raise Refused(lack) if is_refused(supervisor) else UserError(lack)
            await shown(lack)
            try:
                await task
            except OwnedElsewhere as error:
                raise UserError(f"{name} is carried out by another process now: {error}") from error
        self.site.secret_files.forget()
        clear(self.state_dir, name)
        tell(f"{name} was deleted, and is gone")

    async def _until_up(self, rolling: RolloutController, task: asyncio.Task[None]) -> str:
        """Until it serves, or has ended: ""; or what keeps it from that."""
        try:
            async with asyncio.timeout(self.site.wait_s):
                while not task.done():
                    if (lack := lacks(rolling)) is not None:
                        return lack
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            told = rolling.status
            why = told.trouble or (told.report.headline if told.report is not None else "its store does not answer")
            return f"it does not serve after {self.site.wait_s:g} s: {why}"
        return ""


def lacks(rolling: RolloutController) -> str | None:
    """What keeps it from serving for good, "": nothing; None: that is not known yet. A first revision serves when it is
    in place; one that follows another when anybody does."""
    report = rolling.status.report
    if report is None:
        return None
    if rolling.state.stable is not None:
        return "" if report.serves else None
    if report.state is RolloutResult.STUCK:
        return report.headline
    return "" if report.is_done or report.state is RolloutResult.PAUSED else None


def goes_on(held: DesiredDeployment, manifest: Manifest, digests: Mapping[str, str]) -> str:
    """That the store's wish wins over the file's, where they differ; "": they do not. `digests`: of the values of
    secrets that are found now."""
    if held.deleted:
        return f"{manifest.name} is being deleted, and that goes on; then it can be begun anew"
    holds = f"{manifest.name} goes on with revision {held.revision}, which the store holds"
    if held.scaled:
        holds += f", scaled to {', '.join(f'{count} {name}' for name, count in sorted(held.scaled.items()))}"
    if check(held.manifest.encode()).manifest != manifest:
        return f"{holds}; the file differs, and `holdfast apply -f` changes it"
    other = sorted(one for one, digest in digests.items() if held.secret_digests.get(one, digest) != digest)
    if other:
        return f"{holds}, and with its secrets; {', '.join(other)} differ now, and `holdfast apply -f` changes that"
    return ""
