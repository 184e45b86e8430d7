"""This machine as a node of a fleet, beside the processes that `holdfast up --backend local` keeps."""

from __future__ import annotations

import random
from pathlib import Path

from msgspec import Struct

from holdfast.roles.model_names import named
from holdfast.roles.running import Tell
from holdfast.spec.jobs import Job
from holdfast.spec.manifest.local import Machine
from holdfast.store.opening import open_store
from holdfast.supervise.backend import LocalBackend
from holdfast.supervise.hosting import Hosting
from holdfast.supervise.job_list import JobList, kept_jobs
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.replicas import replica_id_of
from holdfast.supervise.secrets import SecretFiles
from holdfast.wire.net import SocketNetwork


class NodeSite(Struct, frozen=True, kw_only=True):
    """What a fleet finds here."""

    deployment: str
    name: str
    state_dir: str
    store: str
    environ: dict[str, str]  # of whoever starts it: replicas have it, too
    totals: dict[str, int]  # bytes that replicas may have together, of each device; of the host under `fleet.room.HOST`
    vault_dir: str = ""
    reach: str = ""  # where frontends on other machines reach its engines
    secrets_dir: str = ""  # empty: `secrets` in the state directory

    def jobs(self) -> list[Job]:
        """Replicas that an earlier supervisor kept."""
        kept = kept_jobs(Path(self.state_dir))
        return [
            job for job in kept if job.deployment == self.deployment and replica_id_of(job.name, self.deployment, ())
        ]

    async def host(self, supervisor: Supervisor, tell: Tell) -> None:
        """Until cancelled."""
        state_dir = Path(self.state_dir)
        source = SecretFiles(state_dir, self.secrets_dir)
        machine = Machine(state_dir, self.environ, self.store, self.vault_dir, reach=self.reach, secret_source=source)
        machine.vaults.mkdir(parents=True, exist_ok=True, mode=0o700)
        store = open_store(self.store, SocketNetwork(), random.Random())
        await store.start()
        try:
            await Hosting(
                self.deployment,
                self.name,
                store,
                LocalBackend(self.deployment, supervisor, JobList(supervisor, state_dir), self.totals),
                machine,
                named,
                tell=tell,
                network=SocketNetwork(),
            ).run()
        finally:
            await store.close()
