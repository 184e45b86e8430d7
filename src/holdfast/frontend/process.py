"""Runs the frontend process: watches the store, keeps links to workers, answers HTTP, and drains before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from holdfast.core.address import TcpAddress, parse_address
from holdfast.core.errors import UserError
from holdfast.core.ports import Network, World
from holdfast.core.tasks import Tasks, beside, done_within, first
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
    TRAFFIC,
    InstanceKey,
)
from holdfast.discovery.registry import Registry
from holdfast.fleet.records import FleetRecord, fleet_key, read
from holdfast.frontend.access import AccessRules, RequestNames
from holdfast.frontend.admission import PROMPT_CHARS_MAX, Admission
from holdfast.frontend.app import App
from holdfast.frontend.kills import KillHandler
from holdfast.frontend.large_bodies import LargeBodies
from holdfast.frontend.metrics import FrontendMetrics, Others, no_others
from holdfast.frontend.model_text import TextMaker
from holdfast.frontend.pages import OPEN_PATHS, StatusPages
from holdfast.frontend.pending_models import PendingModels
from holdfast.frontend.report import FrontendReport, UnservedDemand
from holdfast.frontend.request_tracker import AccessLog, RequestTracker
from holdfast.frontend.requests import RequestsPage
from holdfast.frontend.shedding import DeploymentLevel, DeploymentLevels
from holdfast.frontend.wanted_models import WantedModels, models_of
from holdfast.rollout.traffic import read_routing
from holdfast.spec.launch import FrontendLaunch
from holdfast.store.contract import Deleted, Lost, Put, Registration, Snapshot, Store, watch_key
from holdfast.store.mirror import Mirror
from holdfast.streams.directory import Loadings, ModelDirectory, SetPolicy
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.roster import Roster
from holdfast.streams.verdicts import WorkerVerdicts
from holdfast.wire.accepting import SHARE
from holdfast.wire.http.request import HttpBounds
from holdfast.wire.http.server import HttpServer

log = logging.getLogger("holdfast.frontend")

WATCHED = (CARDS, INSTANCES, STANDBYS)  # what workers register of themselves
EVERYWHERE = ("0.0.0.0", "::")
# Time for the error events of cut-off answers to reach their clients.
LAST_WORDS_S = 0.5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_BYTES = 2**20  # a block of this size or more is mapped by itself; 24 bodies below it leave at most 24 MiB


async def run_frontend(
    settings: FrontendLaunch,
    store: Store,
    world: World,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
    others: Others = no_others,
) -> None:
    """Serve until `stop` is set, then drain."""
    settings.check()
    _map_large_blocks()
    verdicts = WorkerVerdicts(*settings.serves, awaits=(HEALTH, *map(_controls, settings.serves)))
    app = _make_app(settings, store, world, verdicts, others)
    server = _server(app, settings, world.network)
    own = HttpServer(app.pages.handle_own, world.network)
    status = await own.start(parse_address(settings.status_address)) if settings.status_address else None
    address = await server.start(parse_address(settings.address), share_port=True)
    if not settings.api_keys and isinstance(address, TcpAddress) and address.host in EVERYWHERE:
        log.warning("no API key is needed at %s: every client that reaches this machine can use it", address)
    app.pages.roster.start()
    tasks = Tasks("frontend")
    watches = [tasks.spawn(task, name) for name, task in _tasks_of(app, settings, store, world, verdicts)]
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
        await app.pages.roster.close()
        server.close()
        own.close()  # last, because it reports that the frontend drains


def _make_app(settings: FrontendLaunch, store: Store, world: World, verdicts: WorkerVerdicts, others: Others) -> App:
    loop, rng, unix_s = asyncio.get_running_loop(), world.rng, world.clock.unix_s
    directory = ModelDirectory(rng, settings.holds.fresh_max, settings.known)
    dispatcher = Dispatcher(directory, settings.holds, loop.time)
    peer = f"frontend-{rng.getrandbits(32):08x}"
    roster = Roster(directory, dispatcher, world.network, rng, TextMaker(unix_s).prepare, peer, verdicts)
    admission = Admission(directory, dispatcher, rng, unix_s)
    metrics = FrontendMetrics(dispatcher.stats)
    store_state, created = lambda: store.state, int(unix_s())
    pages = StatusPages(directory, dispatcher, roster, created, store_state, metrics, settings.name, others)
    tracker = RequestTracker(directory, metrics, AccessLog() if settings.access_log else None)
    pending = PendingModels(directory, settings.holds, dispatcher.stats, loop.time)
    requests = pages.requests = RequestsPage(
        tracker, pending, directory, loop.time, unix_s, dispatcher.links.place, pages.name
    )
    retry_s, stats = settings.holds.shed_retry_s, dispatcher.stats
    levels = {one: DeploymentLevel(one, directory, stats, retry_s, loop.time) for one in settings.serves}
    pages.level = lambda: levels[settings.deployment].level
    pages.streams = lambda: tracker.inflight
    roster.on_models_changed = pending.wake_all
    return App(
        access=AccessRules(key_tiers(settings.api_keys), frozenset(settings.cors_origins)),
        directory=directory,
        admission=admission,
        pages=pages,
        names=RequestNames(rng),
        tracker=tracker,
        requests=requests,
        kills=KillHandler(requests, store, settings.deployment, peer, rng, unix_s, others),
        pending=pending,
        large=LargeBodies(PROMPT_CHARS_MAX, metrics.reader_lost),
        levels=DeploymentLevels(levels),
        body_bytes_max=settings.body_bytes_max,
    )


def _tasks_of(
    app: App, settings: FrontendLaunch, store: Store, world: World, verdicts: WorkerVerdicts
) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
    """Yield the background tasks: watches of the store, reports, reminders."""
    directory, pending, roster = app.directory, app.pending, app.pages.roster
    clock, unix_s = asyncio.get_running_loop().time, world.clock.unix_s
    registry = Registry(*settings.serves)
    refusals = Refusals(store, registry)
    directory.unread = {*WATCHED, *map(models_of, settings.serves)}
    for prefix in WATCHED:
        yield f"watch {prefix}", _watch(store, prefix, registry, roster, directory, refusals)
    yield "remind waiting clients", pending.remind()
    yield f"watch {KILLS}", app.kills.follow()
    yield f"watch {HEALTH}", _follow_verdicts(store, roster)
    yield f"watch {LOADINGS}", _follow_loading(store, directory, settings)
    reports: list[FrontendReport] = []

    def report_soon() -> None:
        for report in reports:
            report.write_soon()

    app.admission.on_starved = pending.on_starved = report_soon
    for one in settings.serves:
        level, wanted = app.levels.each[one], WantedModels(one, directory, pending.wake_all)
        yield f"controls of {one}", _follow_controls(store, one, roster, verdicts, level)
        yield f"rollout {one}", _follow_rollout(store, one, roster, directory, app.pages, settings)
        yield f"level of {one}", level.follow(store)
        yield f"models of {one}", wanted.follow(store)
        yield f"fleet of {one}", _follow_fleet(store, one, roster, wanted)
        demand = UnservedDemand(one, directory, pending, clock, unix_s).now
        report = FrontendReport(
            store, one, roster, directory, app.tracker, unix_s, settings.name, demand, app.kills.lately
        )
        reports.append(report)
        yield "report", report.run()


def _map_large_blocks() -> None:
    """Let glibc map every block over 1 MiB by itself, so that a large body's memory goes back to the system with it.

    By default glibc raises that bound, to at most 32 MiB, with each mapped block that is freed. Later bodies are then
    allocated in the heap, where one small block behind them keeps all their memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; other C libraries have no such bound
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, 16 * MAPPED_BYTES)  # the default of 128 KiB would cost system calls


def _server(app: App, settings: FrontendLaunch, network: Network) -> HttpServer:
    bounds = HttpBounds(
        body_bytes_max=settings.body_bytes_max,
        buffered_bytes_max=max(HttpBounds().buffered_bytes_max, 2 * settings.body_bytes_max),
        request_s=settings.request_s,
        unread_s=settings.unread_s,
    )
    return HttpServer(app.handle, network, bounds, begin=app.begin, admit=app.admit, share=SHARE, probes=OPEN_PATHS)


class Refusals:
    """Writes into leased keys of the store which workers are not admitted, and why."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._shown: dict[InstanceKey, tuple[str, Registration]] = {}

    async def show(self) -> None:
        """Update the store's keys to the registry's current refusals."""
        refused = self._registry.refused
        for key, reason in refused.items():
            if key not in self._shown:
                self._shown[key] = (reason, self._store.register(REFUSALS + key.path, reason.encode()))
            elif self._shown[key][0] != reason:
                self._shown[key][1].update(reason.encode())
                self._shown[key] = (reason, self._shown[key][1])
        for key in [key for key in self._shown if key not in refused]:
            await self._shown.pop(key)[1].withdraw()


async def _watch(
    store: Store, prefix: str, registry: Registry, roster: Roster, directory: ModelDirectory, refusals: Refusals
) -> None:
    async for event in store.watch(prefix):
        if prefix == INSTANCES:  # every watch gets this event; one is enough
            directory.store_lost = isinstance(event, Lost)
        if isinstance(event, Snapshot):
            roster.apply(registry.snapshot(prefix, event.items))
            directory.unread.discard(prefix)
        elif isinstance(event, Put):
            roster.apply(registry.put(event.key, event.value))
        elif isinstance(event, Deleted):
            roster.apply(registry.deleted(event.key))
        elif isinstance(event, Lost) and prefix == INSTANCES:  # one log line is enough
            log.warning("store lost: %s; serving goes on with what is known", event.reason)
        await refusals.show()


async def _follow_verdicts(store: Store, roster: Roster) -> None:
    async for event in store.watch(HEALTH):
        roster.weights.on_store_event(HEALTH, event)


async def _follow_loading(store: Store, directory: ModelDirectory, settings: FrontendLaunch) -> None:
    """Follow which engines are loading."""
    clock, most_s = asyncio.get_running_loop().time, settings.holds.loading_s
    loadings = Loadings(frozenset(settings.serves), clock)
    directory.loading = loadings.latest
    async for event in store.watch(LOADINGS):
        for loading in loadings.on_store_event(event):
            wait_s = min(most_s, loading.until_s - clock())
            log.info("%s is loading: streams of its set wait for it for up to %.0f s", loading.name, wait_s)


async def _follow_controls(
    store: Store, deployment: str, roster: Roster, verdicts: WorkerVerdicts, level: DeploymentLevel
) -> None:
    """Follow whether a control leads."""
    prefix = _controls(deployment)
    async for event in store.watch(prefix):
        roster.weights.on_store_event(prefix, event)
        level.note_control(verdicts.is_led(deployment) and not isinstance(event, Lost))


def _controls(deployment: str) -> str:
    return f"{CONTROLS}{deployment}/"


async def _follow_rollout(
    store: Store,
    deployment: str,
    roster: Roster,
    directory: ModelDirectory,
    pages: StatusPages,
    settings: FrontendLaunch,
) -> None:
    """Apply the rollout's records: which replicas get no work, and which sets stay."""
    keys = (ROLLOUTS + deployment, TRAFFIC + deployment)
    mirror, before = Mirror(store, keys), None
    async with beside(mirror.run(), f"rollout records of {deployment}"):
        await mirror.whole.wait()  # one record without the other would be taken for an older supervisor's
        while True:
            mirror.news.clear()
            state, traffic = (mirror.values.get(key, b"") for key in keys)
            rollout = read_routing(deployment, state, traffic)
            if rollout is not None and rollout != before:
                before = rollout
                directory.apply_policy(deployment, SetPolicy(rollout.staying, rollout.kept, rollout.inexact))
                roster.weights.set_idle(deployment, rollout.idle)
                if deployment == settings.deployment:
                    pages.replaced = settings.name in rollout.idle
            await mirror.news.wait()


async def _follow_fleet(store: Store, deployment: str, roster: Roster, wanted: WantedModels) -> None:
    """Apply the fleet's record: which replicas get no work, and which models lack replicas. An unreadable record
    changes nothing."""
    key = fleet_key(deployment)
    async for value in watch_key(store, key):
        with contextlib.suppress(UserError):
            record = read(FleetRecord, key, value) if value else FleetRecord()
            roster.weights.set_idle(deployment, record.idle, "fleet")
            wanted.on_fleet_record(record)


async def _drain(app: App, server: HttpServer, drain_s: float) -> None:
    """Accept no new connections, and let answers under way finish for a bounded time."""
    app.pages.draining = True
    server.stop_accepting()
    log.info("draining: %d answers under way", app.tracker.inflight)
    try:
        async with asyncio.timeout(drain_s):
            await app.tracker.idle()
            await server.emptied()  # an answer is finished when its client has it, not when it is written
    except TimeoutError:
        left = f"{app.tracker.inflight} answers under way and {len(server.connections)} connections"
        log.warning("cutting off %s: they were not finished in %g s", left, drain_s)
        server.cut_off(f"this frontend is shutting down and the answer was not finished within {drain_s:g} s")
        await done_within(server.emptied(), LAST_WORDS_S)
