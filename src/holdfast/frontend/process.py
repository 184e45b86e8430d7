"""The frontend process: watch discovery, hold the links, answer HTTP, and leave when the last answer is out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.core.address import Address, TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.core.ports import Network, World
from holdfast.core.tasks import Tasks, first
from holdfast.core.tiers import key_tiers
from holdfast.discovery.keys import (
    CARDS,
    CONTROLS,
    HEALTH,
    INSTANCES,
    KILLS,
    LOADINGS,
    REFUSALS,
    ROLLOUTS,
    STANDBYS,
    InstanceKey,
)
from holdfast.discovery.models import models_of
from holdfast.discovery.registry import Registry
from holdfast.fleet.records import Book, book_key, read
from holdfast.frontend.accounts import AccessLog, Accounts
from holdfast.frontend.admission import Admission, AdmissionSettings
from holdfast.frontend.app import App
from holdfast.frontend.demand import Demands
from holdfast.frontend.gate import Gate, RequestNames
from holdfast.frontend.kills import Kills
from holdfast.frontend.large_bodies import LargeBodies
from holdfast.frontend.levels import AllLevels, Levels
from holdfast.frontend.lobby import Lobby
from holdfast.frontend.metrics import FrontendMetrics, Others, nobody
from holdfast.frontend.model_text import TextMaker
from holdfast.frontend.pages import OPEN_PATHS, Pages
from holdfast.frontend.reporting import Reporting
from holdfast.frontend.requests import Requests
from holdfast.frontend.wanted import Wanted
from holdfast.rollout.records import orders
from holdfast.spec.launch import FrontendLaunch
from holdfast.store.contract import Deleted, Lost, Put, Registration, Snapshot, Store
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.loadings import Loadings
from holdfast.streams.roster import Roster
from holdfast.streams.rulings import Ruling
from holdfast.streams.standings import Standings
from holdfast.wire.accepting import SHARE
from holdfast.wire.http.request import HttpBounds
from holdfast.wire.http.server import HttpServer

log = logging.getLogger("holdfast.frontend")

WATCHED = (CARDS, INSTANCES, STANDBYS)  # workers, as they say that they are there
EVERYWHERE = ("0.0.0.0", "::")
# For the error events of answers that are cut off to reach their clients.
LAST_WORDS_S = 0.5


async def run_frontend(
    settings: FrontendLaunch,
    store: Store,
    world: World,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
    others: Others = nobody,
) -> None:
    """Serve until `stop` is set, then drain."""
    settings.check()
    gate = Gate(key_tiers(settings.api_keys), frozenset(settings.cors_origins))
    loop, network, rng, unix_s = asyncio.get_running_loop(), world.network, world.rng, world.clock.unix_s
    directory = ModelDirectory(rng, settings.holds.fresh_max, settings.known)
    dispatcher = Dispatcher(directory, settings.holds, loop.time)
    peer = f"frontend-{rng.getrandbits(32):08x}"
    standings = Standings(*settings.serves, awaits=(HEALTH, *map(_controls, settings.serves)))
    roster = Roster(directory, dispatcher, network, rng, TextMaker(unix_s).prepare, peer, standings)
    admission = Admission(directory, dispatcher, AdmissionSettings(), rng, unix_s)
    shown = FrontendMetrics(dispatcher.stats)
    pages = Pages(directory, dispatcher, roster, int(unix_s()), lambda: store.state, shown, settings.name, others)
    accounts = Accounts(directory, shown, AccessLog() if settings.access_log else None)
    large = LargeBodies(admission.settings.prompt_chars_max, shown.reader_lost)
    lobby = Lobby(directory, settings.holds, dispatcher.stats, loop.time)
    requests = pages.requests = Requests(accounts, lobby, directory, loop.time, unix_s)
    shed_retry_s, stats = settings.holds.shed_retry_s, dispatcher.stats
    levels = {one: Levels(one, directory, stats, shed_retry_s, loop.time) for one in settings.serves}
    names, kills = RequestNames(rng), Kills(requests, store, settings.deployment, peer, rng, unix_s, others)
    words = directory, admission, pages, names, accounts, requests, kills, lobby, large
    app = App(gate, *words, AllLevels(levels), settings.body_bytes_max)
    pages.level = lambda: levels[settings.deployment].level
    pages.streams = lambda: accounts.inflight
    roster.on_models_changed = lobby.changed
    server = _server(app, settings, network)
    own = HttpServer(pages.handle_own, network)
    status = await own.start(parse_address(settings.status_address)) if settings.status_address else None
    address = await server.start(parse_address(settings.address), share_port=True)
    _warn_if_open(settings, address)
    roster.start()
    registry, tasks = Registry(*settings.serves), Tasks("frontend")
    refusals = Refusals(store, registry)
    directory.unread = {*WATCHED, *map(models_of, settings.serves)}
    watches = [tasks.spawn(_watch(store, prefix, registry, roster, refusals), f"watch {prefix}") for prefix in WATCHED]
    watches += [tasks.spawn(lobby.remind(), "remind who waits"), tasks.spawn(kills.follow(), f"watch {KILLS}")]
    loading = _hear_loading(store, directory, settings)
    watches += [tasks.spawn(_hear(store, roster), f"watch {HEALTH}"), tasks.spawn(loading, f"watch {LOADINGS}")]
    reports = list[Reporting]()
    for one in settings.serves:
        watches.append(tasks.spawn(_hear_controls(store, one, roster, standings, levels[one]), f"controls of {one}"))
        watches.append(tasks.spawn(_hear_rollout(store, one, roster, directory, pages, settings), f"rollouts of {one}"))
        watches.append(tasks.spawn(levels[one].follow(store), f"level of {one}"))
        wanted = Wanted(one, directory, lobby.changed)
        watches.append(tasks.spawn(wanted.follow(store), f"models of {one}"))
        watches.append(tasks.spawn(_hear_fleet(store, one, roster, wanted), f"fleet of {one}"))
        told = (settings.name, Demands(one, directory, lobby, loop.time, unix_s).now, kills.lately)
        reports.append(Reporting(store, one, roster, directory, accounts, unix_s, *told))
    watches += [tasks.spawn(one.run(), "report") for one in reports]
    admission.on_starved = lobby.on_starved = lambda: _tell_soon(reports)
    try:
        on_ready({"address": str(address), "status": str(status or address), "deployment": settings.deployment})
        await first((stop.wait(),), watches)
        for watch in watches:
            if watch.done():  # our own bug, which ends the process
                watch.result()
        await _drain(app, server, settings.drain_s)
    finally:
        await tasks.stop()
        await app.close()
        await roster.close()
        server.close()
        own.close()  # last: while it drains it says so


def _server(app: App, settings: FrontendLaunch, network: Network) -> HttpServer:
    bounds = HttpBounds(
        body_bytes_max=settings.body_bytes_max,
        buffered_bytes_max=max(HttpBounds().buffered_bytes_max, 2 * settings.body_bytes_max),
        request_s=settings.request_s,
        unread_s=settings.unread_s,
    )
    return HttpServer(app.handle, network, bounds, begin=app.begin, admit=app.admit, share=SHARE, probes=OPEN_PATHS)


def _warn_if_open(settings: FrontendLaunch, address: Address) -> None:
    if not settings.api_keys and isinstance(address, TcpAddress) and address.host in EVERYWHERE:
        log.warning("no API key is needed at %s: everyone who reaches this machine can use it", address)


def _tell_soon(reports: Iterable[Reporting]) -> None:
    for one in reports:
        one.soon()


class Refusals:
    """Which workers are not admitted, and why, for all to read in the store; gone with this frontend."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._shown: dict[InstanceKey, tuple[str, Registration]] = {}

    async def show(self) -> None:
        """Bring the store's keys up to what the registry says now."""
        refused = self._registry.refused
        for key, reason in refused.items():
            if key not in self._shown:
                self._shown[key] = (reason, self._store.register(REFUSALS + key.path, reason.encode()))
            elif self._shown[key][0] != reason:
                self._shown[key][1].update(reason.encode())
                self._shown[key] = (reason, self._shown[key][1])
        for key in [key for key in self._shown if key not in refused]:
            await self._shown.pop(key)[1].withdraw()


async def _watch(store: Store, prefix: str, registry: Registry, roster: Roster, refusals: Refusals) -> None:
    async for event in store.watch(prefix):
        if prefix == INSTANCES:  # every watch is told of it
            roster.store_is_lost(isinstance(event, Lost))
        if isinstance(event, Snapshot):
            roster.apply(registry.snapshot(prefix, event.items))
            roster.heard(prefix)
        elif isinstance(event, Put):
            roster.apply(registry.put(event.key, event.value))
        elif isinstance(event, Deleted):
            roster.apply(registry.deleted(event.key))
        elif isinstance(event, Lost) and prefix == INSTANCES:  # people are told once
            log.warning("store lost: %s; serving goes on with what is known", event.reason)
        await refusals.show()


async def _hear(store: Store, roster: Roster) -> None:
    """What control decides."""
    async for event in store.watch(HEALTH):
        roster.weighing.hear(HEALTH, event)


async def _hear_loading(store: Store, directory: ModelDirectory, settings: FrontendLaunch) -> None:
    """Which engines are loading."""
    clock, most_s = asyncio.get_running_loop().time, settings.holds.loading_s
    loadings = Loadings(frozenset(settings.serves), clock)
    directory.loading = loadings.latest
    async for event in store.watch(LOADINGS):
        items: dict[str, bytes] = {}
        if isinstance(event, Snapshot):
            items = event.items
            loadings.snapshot(frozenset(items))
        elif isinstance(event, Put):
            items = {event.key: event.value}
        elif isinstance(event, Deleted):
            loadings.deleted(event.key)
        for path, value in items.items():
            with contextlib.suppress(ValueError):  # another version's
                if (said := loadings.put(path, value)) is not None:
                    wait_s = min(most_s, said.until_s - clock())
                    log.info("%s is loading: streams of its set wait for it for up to %.0f s", said.name, wait_s)


async def _hear_controls(store: Store, deployment: str, roster: Roster, standings: Standings, levels: Levels) -> None:
    """Whether there is one that does."""
    async for event in store.watch(_controls(deployment)):
        roster.weighing.hear(_controls(deployment), event)
        levels.led(standings.is_led(deployment) and not isinstance(event, Lost))


def _controls(deployment: str) -> str:
    """The prefix that a deployment's controls stand under."""
    return f"{CONTROLS}{deployment}/"


async def _hear_rollout(
    store: Store, deployment: str, roster: Roster, directory: ModelDirectory, pages: Pages, settings: FrontendLaunch
) -> None:
    """Who is replaced, or stands by, and which sets stay."""
    key = ROLLOUTS + deployment
    async for event in store.watch(key):
        value = event.items.get(key, b"") if isinstance(event, Snapshot) else None
        if isinstance(event, Put) and event.key == key:
            value = event.value
        elif isinstance(event, Deleted) and event.key == key:
            value = b""
        said = None if value is None else orders(deployment, value)
        if said is not None:
            directory.rule(deployment, Ruling(said.staying, said.kept, said.inexact))
            roster.weighing.idle(deployment, said.idle)
            if deployment == settings.deployment:
                pages.replaced = settings.name in said.idle


async def _hear_fleet(store: Store, deployment: str, roster: Roster, wanted: Wanted) -> None:
    """Whose replicas leave, and which models miss somebody. A book that cannot be read is taken for unchanged."""
    key = book_key(deployment)
    async for event in store.watch(key):
        value = event.items.get(key, b"") if isinstance(event, Snapshot) else None
        if isinstance(event, Put) and event.key == key:
            value = event.value
        elif isinstance(event, Deleted) and event.key == key:
            value = b""
        with contextlib.suppress(UserError):
            if value is not None:
                book = read(Book, key, value) if value else Book()
                roster.weighing.idle(deployment, book.idle, "fleet")
                wanted.lacks(book)


async def _drain(app: App, server: HttpServer, drain_s: float) -> None:
    """No new connections; answers under way go on for a bounded time."""
    app.pages.draining = True
    server.stop_accepting()
    log.info("draining: %d answers under way", app.accounts.inflight)
    try:
        async with asyncio.timeout(drain_s):
            await app.accounts.idle()
            await server.emptied()  # an answer is out when its client has it, not when it is written
    except TimeoutError:
        left = f"{app.accounts.inflight} answers under way and {len(server.connections)} connections"
        log.warning("cutting off %s: they were not finished in %g s", left, drain_s)
        server.cut_off(f"this frontend is shutting down and the answer was not finished within {drain_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.emptied(), LAST_WORDS_S)
