"""`holdfast deploy`: ask a fleet for a model, or for another of what it has.

Always true: only the wish is written; whoever carries it out hears of it from the store. Every mistake is told at once,
and then nothing is asked for.
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
from holdfast.cli.fleet.hope import trouble_of
from holdfast.cli.fleet.seen import DeploymentOption, Fleet, FleetSeen, fleet_at, where
from holdfast.cli.fleet.waiting import Manner, end
from holdfast.cli.fleet.written import ModelText, as_section, as_words, from_file, from_words, idle_words
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import Refused, UserError
from holdfast.fleet.desired import Model
from holdfast.fleet.prospects import too_large
from holdfast.fleet.records import Wish
from holdfast.fleet.wishing import check_name, deployed, model_of, scaling_of, undone
from holdfast.roles.model_names import named
from holdfast.roles.small_files import canary_text, template_path
from holdfast.settings import Environment, handed_on
from holdfast.spec.arguments import UsageError, meant, options_of
from holdfast.spec.engines import ENGINES
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.manifest.fleet import DEVICES_MAX, REPLICAS_MAX
from holdfast.spec.manifest.fleet import Fleet as Fields
from holdfast.spec.manifest.local import Machine
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
        manner = Manner(self.wait, seconds("--timeout", self.timeout), self.json)
        return answered(self._deploy(where(self.store, env), env, manner))

    async def _deploy(self, url: str, env: Environment, manner: Manner) -> int:
        # Who names a store may mean nodes elsewhere, whose directories nobody knows here.
        machine = Machine(Path("/") if self.store else env.state_dir, handed_on(), store=url)
        text = from_file(self.file, machine) if self.file is not None else None
        if text is not None and self.key not in ("", text.key):
            raise Refused(f"KEY is {self.key}, and the service in {self.file} is {text.key}; leave KEY out")
        async with fleet_at(url, text.manifest.name if text is not None else self.deployment, env) as fleet:
            return await _ask(fleet, text or self._written(fleet.deployment, machine), manner)

    def _written(self, deployment: str, machine: Machine) -> ModelText:
        """Refused, after every mistake was told."""
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
        """With paths that mean the same wherever it runs."""
        worker = self.worker
        if worker.engine not in ENGINES:
            raise UserError(f"--engine {worker.engine}: there is no such engine; there are {', '.join(ENGINES)}")
        source = worker.source and named(worker.engine, worker.source, "")[0] if worker.engine != "sim" else ""
        template, canaries = template_path(worker.chat_template), canary_text(worker.canary_prompts)
        return replace(worker, source=source, chat_template=template, canary_prompts=canaries)

    def _service(self, worker: WorkerLaunch) -> dict[str, Any]:
        """As a manifest has it."""
        plain = Deploy()
        words = as_words(plain.worker, worker, options_of(plain, "deploy"))
        sim_name = self.worker.source if worker.engine == "sim" else ""
        fleet = as_section(self.fleet)
        return {
            **({"replicas": self.wanted} if self.wanted is not None else {}),
            "modelName": self.served_name or sim_name or self.key,
            "resources": {"limits": {"gpu": str(self.devices)}},
            "failover": {"enabled": True, "numShadows": self.standbys},
            "extraPodSpec": {"mainContainer": {"args": words}},
            **({"fleet": fleet} if fleet else {}),
        }


async def _ask(fleet: Fleet, text: ModelText, manner: Manner) -> int:
    ((after, told),) = await ask_for(fleet, [text])
    for doubt in _doubts(fleet.seen, after.model):
        Terminal(sys.stderr).line(f"{text.key}: warning: {doubt}", "yellow")
    return await end(fleet, text.key, after, told, manner)


async def ask_for(fleet: Fleet, texts: Sequence[ModelText], *, dry_run: bool = False) -> list[tuple[Wish, str]]:
    """What is wanted of those models from now on, and what that changes, in words; with `dry_run` it is not asked.
    UserError, before any is asked for, if clients could not tell them from each other, or from what is there."""
    wishes = {text.key: _wish_of(text) for text in texts}
    for wish in wishes.values():
        check_name(wish, {**fleet.seen.wishes, **wishes})
    asked = [await _asked(fleet, text, wishes[text.key], dry_run) for text in texts]
    if not dry_run:
        for _, after in asked:
            await fleet.known(after.model.key, after)
        for before, after in asked:
            await _be_alone(fleet, after, before)
    return [(after, _told(before, after)) for before, after in asked]


def _wish_of(text: ModelText) -> Wish:
    try:
        model = model_of(text.key, text.service, text.version, text.needed_bytes)
    except ValueError as error:
        raise Refused(str(error)) from error
    scaling = scaling_of(text.service.fleet.autoscale)
    return Wish(name=text.name, model=model, manifest=text.text, scaling=scaling, at_unix_s=time.time())


async def _asked(fleet: Fleet, text: ModelText, wish: Wish, dry_run: bool) -> tuple[Wish | None, Wish]:
    """How it was wanted before, and how from now on."""
    found: list[Wish | None] = []

    def noted(before: Wish | None) -> Wish | None:
        found[:] = [before]
        if before is None or before.scaling is None or wish.scaling is None:
            return deployed(wish, counts=text.counts)(before)
        # Its traffic may have said how many since: what is asked for again as before is no other word.
        is_new = _count_in(before.manifest, text.key) != _count_in(text.text, text.key)
        after = deployed(wish, counts=text.counts and is_new)(before)
        return replace(before, manifest=text.text) if is_new and after == before else after

    after = noted(fleet.seen.wishes.get(text.key)) if dry_run else await fleet.ask(text.key, noted)
    assert after is not None, "who deploys a model does not forget it"
    return found[0], after


async def _be_alone(fleet: Fleet, asked: Wish, before: Wish | None) -> None:
    """Two may ask for one name at the same instant: whoever was later reads the other's wish with its own, and takes
    its own back. UserError then. It may be that both do."""
    try:
        check_name(asked, fleet.seen.wishes)
    except UserError:
        await fleet.ask(asked.model.key, undone(asked, before))
        raise


def _count_in(manifest: str, key: str) -> Any:
    """How many it says are wanted; None: it does not."""
    return plain(manifest)["spec"]["services"][key].get("replicas")


def _told(before: Wish | None, after: Wish) -> str:
    model = after.model
    wanted = f"{model.hot} desired, served as {after.name}"
    if before is None:
        return f"model {model.key} deployed: version {model.version}, {wanted}"
    if before == after:
        return f"model {model.key} unchanged: version {model.version}, {wanted}"
    if before.model.version == model.version:
        return f"model {model.key} changed: the same version {model.version}, {wanted}"
    return f"model {model.key} changed: version {model.version} in place of {before.model.version}, {wanted}"


def _doubts(seen: FleetSeen, model: Model) -> list[str]:
    """What may keep it from coming, as things are."""
    strangers = sorted(model.nodes - seen.nodes.keys()) if seen.nodes else []
    known = f"there is {', '.join(sorted(seen.nodes))}"
    unknown = [f"no node {one} is there now; {meant(one, seen.nodes, known)}" for one in strangers]
    return [*unknown, *filter(None, (trouble_of(seen), too_large((one.node for one in seen.nodes.values()), model)))]
