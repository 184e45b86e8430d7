"""Applies a whole manifest to a fleet: each of its worker services is a desired model, as with `holdfast deploy -f`;
its frontends and planners are the fleet's own processes.

Always true: there is one way from desired state to processes; all mistakes are reported before anything is written; a
model that is not in the manifest stays as it is, and is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from holdfast.cli.deployments.book import WITH_FLEETS, answered, opened, store_of
from holdfast.cli.deployments.files import Said, Written, shaped
from holdfast.cli.fleet.deploy import ask_for
from holdfast.cli.fleet.observed import PREFIXES, FleetStore, fleet_at
from holdfast.cli.fleet.waiting import WaitOptions, all_in_place
from holdfast.cli.fleet.written import NO_FRONTEND, ModelText, each_of, rules_of_all
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.settings import Environment, handed_on
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.launch import ControlLaunch, FrontendLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine, replica_launches
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.types import FRONTEND, PLANNER, Manifest
from holdfast.spec.manifest.yaml_text import in_yaml, plain

DIFFERS = 1
COLOURS = {"+": "green", "-": "red", "@": "dim"}


def fleet_of(said: Said, store: str, env: Environment) -> str:
    """Return the name of the fleet that a manifest is for; "": it is for none, or that is not known."""
    manifest = check(said.data).manifest
    if manifest is None:
        return ""
    try:
        url = store_of(store, env.state_dir)
    except UserError:  # where it matters it is told
        return ""
    return manifest.name if answered(_is_fleet(url, manifest.name)) else ""


async def _is_fleet(url: str, name: str) -> bool:
    async with opened(url, WITH_FLEETS) as book:
        await book.whole()
        return name in book.fleets


def models_in(said: Said, machine: Machine) -> tuple[Written, list[ModelText]]:
    """Return the manifest's models; Refused, after all mistakes were printed by line."""
    written = shaped(said, rules_of_all(machine), hushed=NO_FRONTEND)
    return written, each_of(written, machine)


def apply(said: Said, store: str, env: Environment, options: WaitOptions, *, dry_run: bool) -> int:
    url = store_of(store, env.state_dir)
    written, texts = models_in(said, Machine(Path("/") if store else env.state_dir, handed_on(), store=url))
    own = [pod.service for pod in pods(written.manifest) if pod.component_type in (FRONTEND, PLANNER)]
    status = answered(_apply(url, written.manifest.name, texts, env, options, dry_run))
    if own:
        which = f"{', '.join(own)}: as `holdfast up` started {'it' if len(own) == 1 else 'them'}"
        Terminal().line(f"{which}; models alone are changed while a fleet runs", "dim")
    return status


async def _apply(
    url: str, name: str, texts: Sequence[ModelText], env: Environment, options: WaitOptions, dry_run: bool
) -> int:
    async with fleet_at(url, name, env) as fleet:
        asked = await ask_for(fleet, texts, dry_run=dry_run)
        for _, told in asked:
            write_out(f"{told}{' (dry run)' if dry_run else ''}\n")
        others = sorted(fleet.observed.desired.keys() - {text.key for text in texts})
        if others:
            which = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not in it, and not changed"
            Terminal().line(f"{which}; `holdfast evict KEY --forget` takes one away", "dim")
        if options.wait and not dry_run:
            await all_in_place(fleet, [desired for desired, _ in asked], options.timeout_s)
    return 0


def diff(said: Said, store: str, env: Environment) -> int:
    """Show what applying the manifest would change, as `holdfast diff` does."""
    url = store_of(store, env.state_dir)
    written, texts = models_in(said, Machine(Path("/") if store else env.state_dir, handed_on(), store=url))
    return answered(_diff(url, written.manifest.name, texts, env))


async def _diff(url: str, name: str, texts: Sequence[ModelText], env: Environment) -> int:
    async with fleet_at(url, name, env) as fleet:
        desired_models = fleet.observed.desired
    terminal, differs = Terminal(), False
    for text in texts:
        desired = desired_models.get(text.key)
        before = in_yaml(plain(desired.manifest), in_order_of_names=True).splitlines() if desired is not None else []
        after = in_yaml(plain(text.text), in_order_of_names=True).splitlines()
        held = f"model {text.key}, generation {desired.model.generation}" if desired is not None else "nothing"
        for line in difflib.unified_diff(before, after, held, "asked for", lineterm=""):
            terminal.line(line, COLOURS.get(line[:1], ""))
            differs = True
    return DIFFERS if differs else 0


# -- of `up`


def fleet_spec(spec: DeploymentSpec, manifest: Manifest, machine: Machine) -> DeploymentSpec:
    """Return the fleet's processes: as many frontends and controls as the manifest has, with the settings of the
    first."""
    spec = replace(spec, name=manifest.name)
    for pod in pods(manifest):
        if pod.component_type not in (FRONTEND, PLANNER) or not pod.replicas:
            continue
        (launch,) = replica_launches(pod, pod.replica(0), (), machine)
        if isinstance(launch, FrontendLaunch):
            at = parse_address(launch.address)
            assert isinstance(at, TcpAddress), launch.address
            spec = replace(spec, frontends=pod.replicas, frontend=launch, host=at.host, port=at.port)
        elif isinstance(launch, ControlLaunch):
            spec = replace(spec, controls=pod.replicas, control=replace(launch, events=spec.control.events))
    return spec


async def deploy_all(url: str, deployment: str, texts: Sequence[ModelText]) -> list[str]:
    """Deploy all models; return what that changed, in words."""
    async with opened(url, PREFIXES) as book:
        await book.whole()
        fleet = FleetStore(book, deployment)
        return [told for _, told in await ask_for(fleet, texts)]
