"""The frontend's status pages: models, liveness, health, metrics. All are GET."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from holdfast.core.log_files import UNWRITTEN
from holdfast.core.tasks import Tasks
from holdfast.discovery.card import ModelCard
from holdfast.frontend.api.errors import model_not_found
from holdfast.frontend.metrics import FrontendMetrics, Others, Scrape, no_others
from holdfast.frontend.pending_models import no_first_worker
from holdfast.frontend.requests import HTML_PATH, RequestsPage
from holdfast.frontend.requests import PATH as REQUESTS
from holdfast.health.watcher import BeatWatcher
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.dispatcher import Dispatcher
from holdfast.streams.link import WorkerLink
from holdfast.streams.roster import Roster
from holdfast.streams.stats import WorkerFailure
from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest

# Answered without a key: probes and scrapers have none.
OPEN_PATHS = frozenset({"/health", "/live", "/metrics"})
_MODELS = "/v1/models"
UNFIT_NAMED_MAX = 4  # in a sentence


@dataclass(slots=True)
class StatusPages:
    """Answers the status pages from the current state."""

    directory: ModelDirectory
    dispatcher: Dispatcher
    roster: Roster
    created: int
    store_state: Callable[[], str]
    metrics: FrontendMetrics
    name: str = "frontend"  # labels the numbers on a page of all frontends of the port
    others: Others = no_others
    draining: bool = False
    replaced: bool = False  # by a rollout: while it drains, requests on open connections are answered
    streams: Callable[[], int] = lambda: 0  # requests under way
    level: Callable[[], int] = lambda: 0  # of degradation
    requests: RequestsPage | None = None
    _scrapes: Tasks = field(default_factory=lambda: Tasks("scrapes"))

    @staticmethod
    def has(path: str) -> bool:
        return path in OPEN_PATHS or path == _MODELS or path.startswith(f"{_MODELS}/")

    def handle_own(self, connection: HttpConnection, request: HttpRequest) -> None:
        """Answer at this frontend's own address; on the shared port another frontend may answer."""
        if request.path == "/metrics" and request.method in ("GET", "HEAD"):
            connection.respond(200, self._own_metrics(), metrics.CONTENT_TYPE)
        elif request.path in OPEN_PATHS and request.method in ("GET", "HEAD"):
            self.answer(connection, request.path)
        elif request.path in (REQUESTS, HTML_PATH) and request.method in ("GET", "HEAD") and self.requests is not None:
            self.requests.answer(connection, request.path, "")
        else:
            error = {"message": f"there are only GET {', '.join(sorted({*OPEN_PATHS, REQUESTS, HTML_PATH}))} here"}
            connection.respond(404, msgspec.json.encode({"error": error}))

    def answer(self, connection: HttpConnection, path: str) -> None:
        """Answer with the page at a path that `has` accepts; raise ApiError for an unknown model."""
        if path == "/live":
            connection.respond(200, b'{"status":"live"}')
        elif path == "/health":
            facts = self.facts()
            connection.respond(200 if facts["status"] == "ready" else 503, msgspec.json.encode(facts))
        elif path == "/metrics":
            Scrape(connection, self.name, self._own_metrics(), self.others, self._scrapes)
        elif path == _MODELS:
            served = self.directory.models()
            named = dict.fromkeys((*served, *self.directory.wanted_names))
            cards = [self._card(name, served.get(name)) for name in named]
            connection.respond(200, msgspec.json.encode({"object": "list", "data": cards}))
        else:
            name = unquote(path.removeprefix(f"{_MODELS}/"))  # clients write "org/name" as org%2Fname
            connection.respond(200, msgspec.json.encode(self._card(name, self.directory.models().get(name))))

    def _own_metrics(self) -> bytes:
        if self.requests is not None:
            self.metrics.pending_bytes.set(self.requests.pending.held_bytes)
        return self.metrics.page(self.roster, self._held())

    def _card(self, name: str, card: ModelCard | None) -> dict[str, Any]:
        if card is None and not self.directory.wants(name):
            if not self.directory.knows(name):
                raise model_not_found(name[:200])
            raise no_first_worker(name, "it is not listed until one is up")
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "holdfast",
            "root": card.root or name if card is not None else name,  # vLLM's bench looks here for the tokenizer
            "parent": None,
            "max_model_len": card.context_tokens_max if card is not None else None,  # unknown without a worker
        }

    def _held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for workers in self.directory.sets.values():
            held[workers.card.name] = held.get(workers.card.name, 0) + len(workers.holds)
        return held

    def facts(self) -> dict[str, Any]:
        """Return what /health shows."""
        routable = sum(workers.table.routable_count for workers in self.directory.sets.values())
        # A fleet starts a worker only for a request: it is ready without one.
        ready = routable or self.directory.is_fleet
        status = "draining" if self.draining else "ready" if ready else "no_worker"
        return {
            "status": status,
            "reason": self._waiting_for() if status == "no_worker" else "",
            "role": "frontend",
            "store": self.store_state(),
            "level": self.level(),
            "streams": self.streams(),
            "held": sum(self._held().values()) + (len(self.requests.pending) if self.requests is not None else 0),
            "resumed_total": sum(self.dispatcher.stats.resumed.values()),
            "models": sorted(self.directory.models()),
            "seams": [_failure(failure) for failure in self.dispatcher.stats.failures],
            "workers": [self._worker(*watched) for watched in self.roster.watchers.items()],
            "unwritten": UNWRITTEN.summary,
        }

    def _worker(self, link: WorkerLink, watcher: BeatWatcher) -> dict[str, Any]:
        objection = link.reason if link.workers is None else self.dispatcher.links.objection(link)
        return {
            "instance": f"{link.slot.name:x}",
            "name": link.instance.name,
            "verdict": str(watcher.liveness.state),
            "reason": objection or watcher.liveness.reason,
            "streams": len(link.streams),
            "active": not objection,
            "epoch": link.epoch,
            "group": link.group,
            "weight": 0.0 if link.objection else link.share.weight,
            "spare": link.share.spare,
            "standing": link.share.status,
            "standing_reason": link.share.reason,
        }

    def _waiting_for(self) -> str:
        """Return why no worker can serve now, naming standbys and workers that may not serve."""
        unfit = [link for link in self.roster.watchers if link.workers is not None and link.active and link.objection]
        if unfit:
            named = "; ".join(f"{link.instance.name}: {link.objection}" for link in unfit[:UNFIT_NAMED_MAX])
            return f"no worker that may serve ({named})"
        standbys = ", ".join(link.instance.name for link in self.roster.standbys)
        if standbys:
            return f"no active worker; {standbys} stands by to take over"
        return "no worker that can serve" if self.roster.watchers else "no worker is known"


def _failure(failure: WorkerFailure) -> dict[str, Any]:
    """Return one failure of a worker as JSON, with what it cost the streams on that worker."""
    return {
        "instance": f"{failure.place.worker:x}",
        "epoch": failure.place.epoch,
        "fall": failure.place.ejections,
        "survived": failure.survived,
        "streams": failure.streams,
        "lost": failure.lost,
        "replayed": failure.replayed,
        "recomputed": failure.recomputed,
        "to": failure.to,
        "worst_gap_ms": round(failure.worst_s * 1000, 1),
    }
