"""`holdfast scale`: change how many replicas there are, of a manifest's service or of a fleet's model.

Always true: a number that the manifest's rules forbid is not written; a revision stays what it is, and its replicas are
not replaced.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import structs

from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.deployments.book import (
    WITH_FLEETS,
    Book,
    Seen,
    StoreOption,
    answered,
    asked_for,
    carried,
    known,
    opened,
    store_of,
)
from holdfast.cli.deployments.waiting import Timeout, Wait, in_place, seconds
from holdfast.cli.deployments.words import name_of
from holdfast.cli.fleet.change import scale_model
from holdfast.cli.fleet.observed import START, DeploymentOption
from holdfast.cli.fleet.waiting import WaitOptions
from holdfast.cli.screen import Screen
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import Refused, UserError
from holdfast.rollout.records import of_kept, scaled_to
from holdfast.settings import Environment
from holdfast.spec.arguments import meant
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.fleet import REPLICAS_MAX
from holdfast.spec.manifest.rules import OF_ALL, OF_EACH
from holdfast.spec.manifest.types import WORKER, Manifest
from holdfast.spec.settings import about


class Scale(CommandOptions, frozen=True):
    """`holdfast scale`."""

    name: Annotated[
        str,
        about(
            "Model of a fleet, or DEPLOYMENT/SERVICE of a manifest; DEPLOYMENT alone if it has one worker service.",
            positional=True,
            required=True,
            flag="NAME",
        ),
    ] = ""
    replicas: Annotated[
        int,
        about(
            "Number of replicas; in a fleet, of HOT ones.",
            positional=True,
            required=True,
            flag="REPLICAS",
            min=0,
            max=REPLICAS_MAX,
        ),
    ] = 0
    wait: Wait = False
    timeout: Timeout = "10m"
    json: Json = False
    deployment: DeploymentOption = ""
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        options = WaitOptions(self.wait, seconds("--timeout", self.timeout), self.json)
        url = store_of(self.store, env.state_dir, START)
        return answered(self._scale(url, env, options))

    async def _scale(self, url: str, env: Environment, options: WaitOptions) -> int:
        name, _, service = self.name.partition("/")
        async with opened(url, WITH_FLEETS) as book:
            await book.heard()
            if name in book.names:
                return await self._scale_service(book, carried(book, name), service, options)
            if service or (book.names and not book.fleets):
                where = ", ".join(f"{one}/SERVICE" for one in book.names) or "none"
                raise UserError(f"there is no deployment {name!r} of a manifest; there is {where}")
        return await scale_model(self.name, self.replicas, url, self.deployment, env, options)

    async def _scale_service(self, book: Book, seen: Seen, service: str, options: WaitOptions) -> int:
        manifest = check(seen.wanted.manifest.encode()).manifest
        if manifest is None:
            raise UserError(f"the manifest of {seen.name} cannot be read by this version; apply one that can")
        service, undone = _service_of(manifest, service), seen.memory.undone
        if undone == seen.wanted.revision:
            mend = "apply a manifest, or name a revision with `holdfast rollout undo --to-revision`, and scale that"
            raise UserError(f"revision {undone} of {seen.name} was undone, and its counts with it; {mend}")
        _check_count(manifest, service, self.replicas)
        counts = {one: settings.replicas for one, settings in manifest.spec.services.items()}
        before = (counts | seen.wanted.scaled)[service]
        change = of_kept(seen.name, scaled_to(seen.name, {service: self.replicas}, counts))
        after = await asked_for(book, seen.name, change)
        if not options.as_json:
            was = f"from {before} " if before != self.replicas else ""
            write_out(f"{name_of(seen.name)}: {service} scaled {was}to {self.replicas}\n")
        try:
            if options.wait:
                screen = Screen(Terminal(sys.stderr) if options.as_json else None)
                await in_place(book, await known(book, seen.name, after), screen, options.timeout_s)
        finally:
            if options.as_json:
                told = {"deployment": seen.name, "service": service, "before": before, "replicas": self.replicas}
                show_json({**told, "revision": after.revision, "serial": after.serial})
        return 0


def _service_of(manifest: Manifest, service: str) -> str:
    """Return the service that is meant. UserError says which there are."""
    names = list(manifest.spec.services)
    workers = list(manifest.of_type(WORKER))
    if not service and len(workers) == 1:
        return workers[0]
    there = f"there are {', '.join(f'{manifest.name}/{one}' for one in names)}"
    if not service:
        raise UserError(f"which service of {manifest.name}? {there[0].upper()}{there[1:]}")
    if service not in names:
        raise UserError(f"{manifest.name} has no service {service!r}; {meant(service, names, there)}")
    return service


def _check_count(manifest: Manifest, service: str, replicas: int) -> None:
    """Refused, if the manifest could not have this number of replicas."""
    settings = structs.replace(manifest.spec.services[service], replicas=replicas)
    spec = structs.replace(manifest.spec, services={**manifest.spec.services, service: settings})
    after = structs.replace(manifest, spec=spec)
    for rule in (*OF_EACH, *OF_ALL):
        before = {str(one) for one in rule(manifest)}
        for finding in rule(after):
            if str(finding) not in before:
                mend = f"; {finding.mend}" if finding.mend else ""
                raise Refused(f"{service} cannot have {replicas} replicas: {finding.what}{mend}")
