"""`holdfast apply` and `diff`: ask for another state of a deployment, or look what asking would change.

Always true: what nobody would carry out is not asked for; `--dry-run` says what would be, and changes nothing.
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from holdfast.cli.arguments import CommandOptions, Filename
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
from holdfast.cli.deployments.files import Written, read_manifest, said_in, shaped
from holdfast.cli.deployments.waiting import DryRun, Timeout, Wait, in_place, seconds
from holdfast.cli.deployments.words import Format, as_object, written
from holdfast.cli.fleet import manifest
from holdfast.cli.fleet.waiting import WaitOptions
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import Refused, UndecidedError, UserError
from holdfast.rollout.records import DesiredDeployment, applied, of_kept
from holdfast.rollout.revision import changes, revision_of
from holdfast.settings import Environment, handed_on
from holdfast.spec.arguments import UsageError
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.secrets import refers
from holdfast.spec.manifest.yaml_text import in_yaml, plain
from holdfast.supervise.secrets import SecretFiles

DIFFERS = 1


class Apply(CommandOptions, frozen=True):
    """`holdfast apply`."""

    file: Filename = None
    dry_run: DryRun = False
    wait: Wait = False
    timeout: Timeout = "0"
    output: Format = None
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        timeout_s, said = seconds("--timeout", self.timeout), said_in("apply", self.file)
        if fleet := manifest.fleet_of(said, self.store, env):
            if self.output:
                raise UsageError(f"-o: {fleet} is a fleet, whose models `holdfast get models --json` shows")
            options = WaitOptions(self.wait, timeout_s, as_json=False)
            return manifest.apply(said, self.store, env, options, dry_run=self.dry_run)
        url, files = store_of(self.store, env.state_dir), SecretFiles(env.state_dir, env.secrets_dir)
        asked = read_manifest(said, env.state_dir, handed_on(), None if self.store else files)
        return answered(self._apply(asked, url, timeout_s, files))

    async def _apply(self, asked: Written, url: str, timeout_s: float | None, files: SecretFiles) -> int:
        name = asked.manifest.name
        async with opened(url, WITH_FLEETS) as book:
            await book.heard()
            before = _kept_here(book, name)
            asked = replace(asked, secret_digests=self._digests(asked, before, files))
            digests, undone = asked.secret_digests, before.memory.undone
            change = of_kept(name, applied(asked.asked, time.time(), undone=undone))
            after = change(before.wanted)
            if not self.dry_run:
                after = await asked_for(book, name, change)
                if _runs_at(before, files):
                    files.asked_with(digests, _needed(before))
            elif after != before.wanted:
                after = structs.replace(after, serial=after.serial + 1)  # of it nobody has told anything
            self._show(asked, before.wanted, after, before)
            if self.dry_run or not self.wait:
                return 0
            seen = await known(book, name, after)
            return await in_place(book, seen, Screen(Terminal(sys.stderr) if self.output else None), timeout_s)

    def _digests(self, asked: Written, before: Seen, files: SecretFiles) -> Mapping[str, str]:
        """Return the hashes of the manifest's secrets; UserError, if their values are on another machine."""
        if _runs_at(before, files):
            return files.digests(asked.manifest, handed_on(), keep=not self.dry_run)
        if refers(asked.manifest):
            where = (
                f"{before.supervisor.host}, in {before.supervisor.state_dir}" if before.supervisor is not None else "it"
            )
            what = f"{asked.manifest.name} refers to secrets, which are read where it runs"
            raise UserError(f"{what}; run `holdfast apply` on {where}")
        return before.wanted.secret_digests

    def _show(self, asked: Written, before: DesiredDeployment, after: DesiredDeployment, seen: Seen) -> None:
        if self.output in ("yaml", "json"):
            write_out(written([as_object(replace(seen, wanted=after))], self.output, is_list=False))
        elif self.output:
            write_out(f"{asked.manifest}\n")
        else:
            told = "unchanged" if _asks_the_same(after, before) else "configured"
            write_out(f"{asked.manifest} {told}{' (dry run)' if self.dry_run else ''}\n")


def _runs_at(seen: Seen, files: SecretFiles) -> bool:
    """Return whether the deployment is carried out from the state directory of these secrets."""
    supervisor = seen.supervisor
    return supervisor is not None and (supervisor.host, supervisor.state_dir) == (os.uname().nodename, files.state_dir)


def _needed(seen: Seen) -> set[str]:
    """Return the hashes of all values that a revision in the history was asked for with."""
    known = [seen.wanted.secret_digests, *(entry.secret_digests for entry in seen.entries)]
    return {digest for one in known for digest in one.values()}


def _asks_the_same(one: DesiredDeployment, other: DesiredDeployment) -> bool:
    """Whatever remarks their texts have, and fields that do nothing."""
    manifests = [check(wanted.manifest.encode()).manifest for wanted in (one, other)]
    return one.revision == other.revision and manifests[0] == manifests[1]


def _kept_here(book: Book, name: str) -> Seen:
    """What is applied to; UserError, if nobody would carry it out."""
    if book.seen(name) is None:
        there = f"there is {', '.join(book.names)}" if book.names else "there is none"
        if book.fleets:
            there += f", and a fleet {', '.join(sorted(book.fleets))}, for manifests of that name"
        raise UserError(
            f"no supervisor here runs a deployment {name!r} ({there}); start one with `holdfast up -f FILE`, "
            "in a HOLDFAST_STATE_DIR of its own"
        )
    return carried(book, name)


class Diff(CommandOptions, frozen=True):
    """`holdfast diff`: 0 nothing would change, 1 something would, more: it could not be found out."""

    file: Filename = None
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        try:
            said = said_in("diff", self.file)
            if manifest.fleet_of(said, self.store, env):
                return manifest.diff(said, self.store, env)
            asked, files = shaped(said), SecretFiles(env.state_dir, env.secrets_dir)
            found = files.digests(asked.manifest, handed_on(), keep=False)
            return answered(self._diff(replace(asked, secret_digests=found), store_of(self.store, env.state_dir)))
        except (Refused, UsageError):
            raise
        except UserError as error:
            raise UndecidedError(str(error)) from error

    async def _diff(self, asked: Written, url: str) -> int:
        async with opened(url) as book:
            await book.whole()
            seen = book.seen(asked.manifest.name)
        held = None if seen is None or seen.wanted.deleted else seen.wanted
        return _show_difference(asked, held)


def _show_difference(asked: Written, held: DesiredDeployment | None) -> int:
    """As a patch of what the store holds; on the error output, who would be replaced."""
    before = [] if held is None else in_yaml(plain(held.manifest), in_order_of_names=True).splitlines()
    after = in_yaml(plain(asked.text), in_order_of_names=True).splitlines()
    names = (f"{asked.manifest.name}, revision {held.revision}" if held is not None else "nothing", "asked for")
    lines = list(difflib.unified_diff(before, after, *names, lineterm=""))
    terminal = Terminal()
    for line in lines:
        terminal.line(line, {"+": "green", "-": "red", "@": "dim"}.get(line[:1], ""))
    known = check(held.manifest.encode()).manifest if held is not None else None
    digests = held.secret_digests if held is not None else {}
    old = revision_of(known, 1, digests) if known is not None else None
    new = revision_of(asked.manifest, 1, {**digests, **asked.secret_digests})
    for told in changes(old, new):
        Terminal(sys.stderr).line(told)
    scaled, counts = (held.scaled, held.counts) if held is not None else ({}, {})
    for name, replicas in scaled.items():
        if name in new.parts and new.parts[name].replicas == counts[name]:
            stays = f"{name}: stays scaled to {replicas}: the file has the same number of replicas as before"
            Terminal(sys.stderr).line(stays)
    return DIFFERS if lines or (old is not None and new.brings(old)) else 0
