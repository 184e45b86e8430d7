"""`holdfast rollout`: how far a deployment's rollout is, what there was before, and to pause, resume or undo it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec.structs import replace

from holdfast.cli.arguments import CommandOptions
from holdfast.cli.deployments.book import Seen, StoreOption, answered, asked_for, carried, known, opened, store_of
from holdfast.cli.deployments.names import Name
from holdfast.cli.deployments.waiting import DryRun, Timeout, Wait, in_place, seconds
from holdfast.cli.deployments.words import Format, age, name_of, written
from holdfast.cli.screen import Screen
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.rollout.records import (
    AskedManifest,
    Change,
    ChangeKind,
    HistoryEntry,
    LastChange,
    applied,
    of_kept,
    paused,
    resumed,
    scaled_to,
    undo_target,
)
from holdfast.rollout.status import RolloutResult
from holdfast.settings import Environment
from holdfast.spec.settings import about

if TYPE_CHECKING:
    from holdfast.spec.manifest.types import Manifest  # loads what reads YAML

TITLES = ("revision", "age", "cause", "outcome")


class Status(CommandOptions, frozen=True):
    """`holdfast rollout status`."""

    name: Name = ""
    watch: Annotated[bool, about("Wait until the rollout is over.", flag="--watch/--no-watch")] = True
    timeout: Timeout = "0"
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        timeout_s = seconds("--timeout", self.timeout)
        return answered(self._look(store_of(self.store, env.state_dir), timeout_s))

    async def _look(self, url: str, timeout_s: float | None) -> int:
        async with opened(url) as book:
            await book.heard()
            seen = book.one(self.name)
            if seen.unheard:
                raise UserError(seen.unheard)
            if self.watch and not seen.wanted.deleted:
                return await in_place(book, seen, Screen(), timeout_s)
        return _show(seen)


def _show(seen: Seen) -> int:
    """As it is now; 1, if it will not be as it was asked for."""
    screen, report = Screen(), seen.report
    if report is None:
        screen.line(f"{seen.name}: revision {seen.wanted.revision} is to begin")
        return 0
    screen.line(f"{seen.name}: {report.headline}")
    for service in report.services:
        screen.line(f"  {service}")
    return int(report.state in (RolloutResult.UNDONE, RolloutResult.STUCK) or report.is_unwell)


class History(CommandOptions, frozen=True):
    """`holdfast rollout history`."""

    name: Name = ""
    revision: Annotated[int, about("Show the manifest of this revision (0: list all revisions).", min=0)] = 0
    output: Format = None
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        seen = answered(self._look(store_of(self.store, env.state_dir)))
        if self.revision:
            write_out(_manifest(seen, self.revision, self.output))
        elif self.output == "name":
            write_out("".join(f"{entry.number}\n" for entry in seen.entries))
        elif self.output:
            write_out(written([_as_object(entry) for entry in seen.entries], self.output, is_list=True))
        else:
            rows = [[(text, "") for text in _row(entry)] for entry in seen.entries]
            Screen().terminal.table(TITLES, rows, right=("revision",))
        return 0

    async def _look(self, url: str) -> Seen:
        async with opened(url) as book:
            await book.whole()
            return book.one(self.name)


def _manifest(seen: Seen, number: int, form: str | None) -> str:
    kept = {entry.number: entry for entry in seen.entries}
    if number not in kept:
        raise UserError(f"revision {number} is not kept; there are {', '.join(map(str, kept)) or 'none'}")
    from holdfast.spec.manifest.yaml_text import plain

    text = kept[number].manifest
    return text if not form else written([plain(text)], form, is_list=False)


def _row(entry: HistoryEntry) -> tuple[str, ...]:
    took = f", after {entry.took_s:.1f} s" if entry.took_s is not None else ""
    why = f": {entry.why}" if entry.why else ""
    return str(entry.number), age(time.time() - entry.at_unix_s), entry.cause, f"{entry.result}{took}{why}"


def _as_object(entry: HistoryEntry) -> dict[str, object]:
    from holdfast.spec.manifest.yaml_text import plain

    return {
        "revision": entry.number,
        "atUnixSeconds": entry.at_unix_s,
        "cause": entry.cause,
        "state": str(entry.result),
        **({"why": entry.why} if entry.why else {}),
        **({"tookSeconds": entry.took_s} if entry.took_s is not None else {}),
        "manifest": plain(entry.manifest),
    }


class Pause(CommandOptions, frozen=True):
    """`holdfast rollout pause`."""

    name: Name = ""
    store: StoreOption = ""

    on: ClassVar[bool] = True

    def run(self, env: Environment) -> int:
        return answered(self._ask(store_of(self.store, env.state_dir)))

    async def _ask(self, url: str) -> int:
        async with opened(url) as book:
            await book.heard()
            seen = carried(book, self.name)
            if seen.wanted.deleted:
                raise UserError(f"{seen.name} is being deleted")
            by = () if self.on else _paused_in(_checked(seen.wanted.manifest))
            stays = f"{', '.join(by)} of {seen.name} stays paused by its manifest (rollout.paused): change it there"
            if seen.wanted.paused is self.on:
                raise UserError(stays if by else f"{seen.name} is {'already' if self.on else 'not'} paused")
            await asked_for(book, seen.name, paused(seen.name, on=self.on))
        write_out(f"{name_of(seen.name)} {'paused' if self.on else 'resumed'}\n")
        if by:
            raise UserError(stays)
        return 0


def _checked(text: str) -> Manifest:
    """Return a manifest that is kept. UserError, if it cannot be read here."""
    from holdfast.spec.manifest.checking import check

    manifest = check(text.encode()).manifest
    if manifest is None:
        raise UserError("its manifest cannot be read by this version; apply one that can")
    return manifest


def _paused_in(manifest: Manifest) -> list[str]:
    return [name for name, service in manifest.spec.services.items() if service.rollout.paused]


class Resume(Pause, frozen=True):
    """`holdfast rollout resume`."""

    on: ClassVar[bool] = False


class Undo(CommandOptions, frozen=True):
    """`holdfast rollout undo`."""

    name: Name = ""
    to_revision: Annotated[int, about("Revision to return to (0: the previous one).", min=0)] = 0
    wait: Wait = False
    timeout: Timeout = "0"
    dry_run: DryRun = False
    store: StoreOption = ""

    def run(self, env: Environment) -> int:
        timeout_s = seconds("--timeout", self.timeout)
        return answered(self._ask(store_of(self.store, env.state_dir), timeout_s))

    async def _ask(self, url: str, timeout_s: float | None) -> int:
        async with opened(url) as book:
            await book.heard()
            seen = carried(book, self.name)
            if seen.wanted.deleted:
                raise UserError(f"{seen.name} is being deleted")
            last = seen.wanted.change if not seen.memory.undone else None
            if last is not None and not self.to_revision and last.kind == ChangeKind.COUNTS:
                change, told = scaled_to(seen.name, last.before, seen.wanted.counts, "undo"), _told_counts(last)
            else:
                change, told = self._back(seen)
            told = f"{name_of(seen.name)} {told}" + (", and resumed" if seen.wanted.paused else "")
            if self.dry_run:
                write_out(f"{told} (dry run)\n")
                return 0
            after = await asked_for(book, seen.name, of_kept(seen.name, resumed(change)))
            number = f", as revision {after.revision}" if after.revision != seen.wanted.revision else ""
            write_out(f"{told}{number}\n")
            return await in_place(book, await known(book, seen.name, after), Screen(), timeout_s) if self.wait else 0

    def _back(self, seen: Seen) -> tuple[Change, str]:
        """Return the change to an earlier revision, and what that is, in words."""
        # The supervisor may not have read the newest revision yet.
        memory = replace(seen.memory, desired_number=seen.wanted.revision)
        last = seen.wanted.change if not memory.undone else None
        if last is not None and not self.to_revision and last.kind != ChangeKind.REVISION:
            what = f"the last change ({last.cause}) replaced no replica: it changed only how replicas are replaced"
            raise UserError(f"{what}; apply the earlier manifest, or name a revision with --to-revision")
        back = undo_target(seen.entries, memory, self.to_revision)
        manifest = _checked(back.manifest)
        if by := _paused_in(manifest):
            stays = f"its manifest pauses {', '.join(by)} (rollout.paused)"
            raise UserError(f"revision {back.number} would not begin: {stays}; apply that manifest without it")
        cause, asked = f"undo to {back.number}", AskedManifest.of(back.manifest, manifest, back.secret_digests)
        kept = {name: now for name, now in seen.wanted.replicas.items() if asked.counts.get(name, now) != now}
        stay = f" with {_words(kept)} as now" if kept else ""
        change = applied(asked, time.time(), cause=cause, undone=memory.undone, keep_counts=True)
        return change, f"rolled back to revision {back.number}{stay}"


def _told_counts(last: LastChange) -> str:
    """Return in words what an undo of other counts does."""
    was = ", ".join(f"{last.after[name]} {name}" for name in sorted(last.before) if name in last.after)
    return f"scaled back to {_words(last.before)} from {was} (undoing: {last.cause})"


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
