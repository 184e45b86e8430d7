"""`holdfast deploy`: deploy a model to a fleet, or change one.

Always true: only the desired state is written, and control acts on it; all mistakes are reported at once, and then
nothing is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace

from holdfast.cli.arguments import CommandOptions, Filename, Json
from holdfast.cli.deployments.book import StoreOption, answered
from holdfast.cli.deployments.waiting import Timeout, Wait, seconds
from holdfast.cli.fleet.observed import DeploymentOption, FleetStore, ObservedFleet, fleet_at, where
from holdfast.cli.fleet.waiting import WaitOptions, end, trouble_of
from holdfast.cli.fleet.written import ModelText, from_file, from_words, idle_words
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import Refused, UserError
from holdfast.fleet.desired import Model
from holdfast.fleet.desired_changes import check_name, deploy, model_from_service, scaling_from, undo_deploy
from holdfast.fleet.outlook import too_large
from holdfast.fleet.records import DesiredModel
from holdfast.roles.model_names import named
from holdfast.roles.small_files import canary_text, template_path
from holdfast.settings import Environment, handed_on
from holdfast.spec.arguments import UsageError, meant
from holdfast.spec.engines import ENGINES
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.manifest.fleet import DEVICES_MAX, REPLICAS_MAX
from holdfast.spec.manifest.fleet import Fleet as Fields
from holdfast.spec.manifest.from_options import shared_memory, worker_settings
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.parts import as_plain
from holdfast.spec.manifest.types import WORKER
from holdfast.spec.manifest.yaml_text import plain
from holdfast.spec.settings import about

_FLEET = {"panel": "The fleet"}


class Deploy(CommandOptions, frozen=True):
    """`holdfast deploy`."""

    key: Annotated[
        str,
        about(
            "Name of the model in the fleet; with -f, the service's name in the manifest.", positional=True, flag="KEY"
        ),
    ] = ""
    file: Filename = None
    served_name: Annotated[
        str, about("Model name that clients use (default: KEY; with --engine sim, --model if given).")
    ] = ""
    wanted: Annotated[
        int | None,
        about(
            "Number of HOT replicas now (default: 1, or unchanged if already deployed).",
            min=0,
            max=REPLICAS_MAX,
            **_FLEET,
        ),
    ] = None
    standbys: Annotated[int, about("Standby engines per replica.", min=0, max=1, vaults=1, **_FLEET)] = 1
    devices: Annotated[int, about("Devices per replica, all on one node.", min=1, max=DEVICES_MAX, **_FLEET)] = 1
    fleet: Annotated[Fields, about("Replicas, placement and scaling in the fleet.", commands=("deploy",), **_FLEET)] = (
        Fields()
    )
    worker: Annotated[WorkerLaunch, about("Engine settings.")] = WorkerLaunch(engine="torch", model="", source="")
    wait: Wait = False
    timeout: Timeout = "10m"
    json: Json = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        if not self.key and self.file is None:
            raise UsageError("`holdfast deploy` needs KEY, what the model is called, or -f FILE")
        options = WaitOptions(self.wait, seconds("--timeout", self.timeout), self.json)
        return answered(self._deploy(where(self.store, env), env, options))

    async def _deploy(self, url: str, env: Environment, options: WaitOptions) -> int:
        # With --store the nodes may be elsewhere, and their directories are not known here.
        machine = Machine(Path("/") if self.store else env.state_dir, handed_on(), store=url)
        text = from_file(self.file, machine) if self.file is not None else None
        if text is not None and self.key not in ("", text.key):
            raise Refused(f"KEY is {self.key}, and the service in {self.file} is {text.key}; leave KEY out")
        async with fleet_at(url, text.manifest.name if text is not None else self.deployment, env) as fleet:
            return await _ask(fleet, text or self._written(fleet.deployment, machine), options)

    def _written(self, deployment: str, machine: Machine) -> ModelText:
        """Return the model's manifest; Refused, after all mistakes were printed."""
        wrong = idle_words(self.fleet)
        try:
            worker = self._worker()
        except UserError as error:
            worker, wrong = self.worker, [*wrong, str(error)]
        text, more = from_words(deployment, self.key, self._service(worker), machine)
        terminal = Terminal(sys.stderr)
        for line in (wrong := [*wrong, *more]):
            terminal.line(f"{self.key}: {line}", "red")
        if wrong or text is None:
            count = f"{len(wrong)} {'mistake' if len(wrong) == 1 else 'mistakes'}"
            raise Refused(f"{self.key} cannot be deployed: {count}")
        return text

    def _worker(self) -> WorkerLaunch:
        """Return the worker with absolute paths."""
        worker = self.worker
        if worker.engine not in ENGINES:
            raise UserError(f"--engine {worker.engine}: there is no such engine; there are {', '.join(ENGINES)}")
        source = worker.source and named(worker.engine, worker.source, "")[0] if worker.engine != "sim" else ""
        template, canaries = template_path(worker.chat_template), canary_text(worker.canary_prompts)
        return replace(worker, source=source, chat_template=template, canary_prompts=canaries)

    def _service(self, worker: WorkerLaunch) -> dict[str, Any]:
        """Return the service in a manifest's form."""
        sim_name = self.worker.source if worker.engine == "sim" else ""
        fleet = as_plain(self.fleet)
        return {
            "componentType": WORKER,
            **({"replicas": self.wanted} if self.wanted is not None else {}),
            "modelName": self.served_name or sim_name or self.key,
            **shared_memory(self.devices, self.standbys),
            "worker": worker_settings(worker),
            **({"fleet": fleet} if fleet else {}),
        }


async def _ask(fleet: FleetStore, text: ModelText, options: WaitOptions) -> int:
    ((after, told),) = await ask_for(fleet, [text])
    for doubt in _doubts(fleet.observed, after.model):
        Terminal(sys.stderr).line(f"{text.key}: warning: {doubt}", "yellow")
    return await end(fleet, text.key, after, told, options)


async def ask_for(
    fleet: FleetStore, texts: Sequence[ModelText], *, dry_run: bool = False
) -> list[tuple[DesiredModel, str]]:
    """Write the desired state of these models; return it, and what that changes, in words. With `dry_run` nothing is
    written. UserError, before anything is written, if two models would have one name."""
    desired_models = {text.key: _desired_of(text) for text in texts}
    for desired in desired_models.values():
        check_name(desired, {**fleet.observed.desired, **desired_models})
    asked = [await _asked(fleet, text, desired_models[text.key], dry_run) for text in texts]
    if not dry_run:
        for _, after in asked:
            await fleet.known(after.model.key, after)
        for before, after in asked:
            await _be_alone(fleet, after, before)
    return [(after, _told(before, after)) for before, after in asked]


def _desired_of(text: ModelText) -> DesiredModel:
    try:
        model = model_from_service(text.key, text.service, text.version, text.needed_bytes)
    except ValueError as error:
        raise Refused(str(error)) from error
    scaling = scaling_from(text.service.fleet.autoscale)
    return DesiredModel(name=text.name, model=model, manifest=text.text, scaling=scaling, at_unix_s=time.time())


async def _asked(
    fleet: FleetStore, text: ModelText, desired: DesiredModel, dry_run: bool
) -> tuple[DesiredModel | None, DesiredModel]:
    """Return the desired state before and after."""
    found: list[DesiredModel | None] = []

    def noted(before: DesiredModel | None) -> DesiredModel | None:
        found[:] = [before]
        if before is None or before.scaling is None or desired.scaling is None:
            return deploy(desired, counts=text.counts)(before)
        # Its traffic may have said how many since: what is asked for again as before is no other word.
        is_new = _count_in(before.manifest, text.key) != _count_in(text.text, text.key)
        after = deploy(desired, counts=text.counts and is_new)(before)
        return replace(before, manifest=text.text) if is_new and after == before else after

    after = noted(fleet.observed.desired.get(text.key)) if dry_run else await fleet.ask(text.key, noted)
    assert after is not None, "deploying does not remove a model"
    return found[0], after


async def _be_alone(fleet: FleetStore, asked: DesiredModel, before: DesiredModel | None) -> None:
    """Undo a deploy if another deployed the same name at the same moment: the later one reads both, and undoes its own.
    UserError then. It may be that both do."""
    try:
        check_name(asked, fleet.observed.desired)
    except UserError:
        await fleet.ask(asked.model.key, undo_deploy(asked, before))
        raise


def _count_in(manifest: str, key: str) -> Any:
    """Return the number of replicas that it says; None: it does not."""
    return plain(manifest)["spec"]["services"][key].get("replicas")


def _told(before: DesiredModel | None, after: DesiredModel) -> str:
    model = after.model
    wanted = f"{model.hot} desired, served as {after.name}"
    if before is None:
        return f"model {model.key} deployed: version {model.version}, {wanted}"
    if before == after:
        return f"model {model.key} unchanged: version {model.version}, {wanted}"
    if before.model.version == model.version:
        return f"model {model.key} changed: the same version {model.version}, {wanted}"
    return f"model {model.key} changed: version {model.version} in place of {before.model.version}, {wanted}"


def _doubts(observed: ObservedFleet, model: Model) -> list[str]:
    """Return what may keep the model from being placed now."""
    strangers = sorted(model.nodes - observed.nodes.keys()) if observed.nodes else []
    known = f"there is {', '.join(sorted(observed.nodes))}"
    unknown = [f"no node {one} is there now; {meant(one, observed.nodes, known)}" for one in strangers]
    return [
        *unknown,
        *filter(None, (trouble_of(observed), too_large((one.node for one in observed.nodes.values()), model))),
    ]
