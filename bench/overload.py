"""`python -m bench.overload`: several frontends on workers that cannot take half of what is asked, and what was served.

Each frontend has clients of its own, as uneven in number as `shares` says; each client asks one request after another
and comes back when it is told to. A frontend's clients want at least its fair share, so all frontends should
finish about as much. Every answer is compared with the same request's answer on idle workers. With `kill_every_s` a
worker is killed and started again all the while: then streams are resumed, and each migration counted must be one a
client was told of.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvloop

from bench.command import main, show, tell
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.settings import Environment
from holdfast.spec.settings import about
from holdfast.testing.answers import Answer, difference
from holdfast.testing.clients import Received, ask, read_answer
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port
from holdfast.testing.waiting import in_thread
from holdfast.testing.workload import Workload

STORIES = 16  # requests that differ
# A client that is not told when to come back; also what a broken connection costs.
COME_BACK_S = 1.0
# For a place, in the frontend's line and in the engine's queue: some clients are to be refused.
QUEUE_S = 5.0


@dataclass(frozen=True, slots=True)
class OverloadBench:
    """How much is asked of how little."""

    seconds: float = 60.0
    workers: int = 1
    concurrency: int = 8  # of each worker,
    queue: int = 8  # and how many more wait there
    load: float = 2.0  # clients for each place of the workers
    shares: tuple[int, ...] = (3, 1)  # of the clients, by frontend
    tokens: int = 25
    tpot_ms: float = 20.0
    kill_every_s: float = 0.0  # 0: no kills
    seed: int = 1

    @property
    def places(self) -> int:
        return self.workers * (self.concurrency + self.queue)

    @property
    def clients(self) -> list[int]:
        """By frontend; each has enough to want its fair share."""
        least = -(-self.places // len(self.shares)) * 3 // 2
        return [max(least, round(self.load * self.places * share / sum(self.shares))) for share in self.shares]


@dataclass(slots=True)
class Client:
    """Counts what one client saw."""

    frontend: int
    completed: int = 0
    resumed: int = 0
    wrong: int = 0
    refused: Counter[int] = field(default_factory=Counter)  # by status; 0: no answer at all
    unguided: int = 0  # refused with 429 and not told when to come back
    waits_s: list[float] = field(default_factory=list)  # first try to first byte, with all the tries between
    refused_after_s: list[float] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)


def run(bench: OverloadBench, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All of it; the result is flat."""
    sim = {"concurrency": bench.concurrency, "queue": bench.queue, "tpot_ms": bench.tpot_ms}
    ports = [free_port() for _ in bench.shares]
    with Deployment(bench.workers, sim, frontend={"holds": {"queue_s": QUEUE_S}}) as deployment:
        for number, port in enumerate(ports):
            deployment.start_frontend(f"frontend-{number}", port)
        deployment.wait_until(
            lambda: all(len(deployment.alive_workers(port)) == bench.workers for port in ports), "their workers"
        )
        return uvloop.run(_run(bench, deployment, ports, tell))


async def _run(
    bench: OverloadBench, deployment: Deployment, ports: list[int], tell: Callable[[str], None]
) -> dict[str, Any]:
    load = Workload(STORIES, bench.tokens, bench.seed)
    expected = await _unloaded(ports[0], load, bench.places)
    tell(f"{sum(bench.clients)} clients ({', '.join(map(str, bench.clients))}) for {bench.places} places")
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(hammer(ports, bench.clients, load, expected, over))
        killing = tasks.create_task(_keep_killing(bench, deployment, over))
        await asyncio.sleep(bench.seconds)
        over.set()
    pages = [(await in_thread(deployment.get, "/metrics", port))[1].decode() for port in ports]
    return judge(asking.result(), pages) | {
        "seconds": bench.seconds,
        "places": bench.places,
        "clients": sum(bench.clients),
        "kills": killing.result(),
    }


async def _unloaded(port: int, load: Workload, places: int) -> list[Answer]:
    """Every request's answer while there is a place for each."""
    answers: list[Answer] = []
    for first in range(0, STORIES, places):
        numbers = range(first, min(first + places, STORIES))
        answers += map(read_answer, await asyncio.gather(*(ask(port, *load.body(number)) for number in numbers)))
    return answers


async def _keep_killing(bench: OverloadBench, deployment: Deployment, over: asyncio.Event) -> int:
    rng = random.Random(bench.seed)
    kills = 0
    while bench.kill_every_s and not await _passed(over, bench.kill_every_s):
        name = rng.choice(deployment.worker_names)
        await in_thread(deployment.kill, name)
        # In this thread: the kernel ends a child with the thread that asked for it.
        deployment.start_worker(name)
        kills += 1
    return kills


async def _passed(over: asyncio.Event, seconds: float) -> bool:
    """Whether it is over, at the latest after so long."""
    try:
        async with asyncio.timeout(seconds):
            await over.wait()
    except TimeoutError:
        return False
    return True


async def hammer(
    ports: list[int], clients: list[int], load: Workload, expected: list[Answer], over: asyncio.Event
) -> list[Client]:
    """So many clients at each port, all asking until it is over; what each saw."""
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(_keep_asking(port, Client(frontend), number, load, expected, over))
            for frontend, port in enumerate(ports)
            for number in range(clients[frontend])
        ]
    return [task.result() for task in asking]


async def _keep_asking(
    port: int, client: Client, number: int, load: Workload, expected: list[Answer], over: asyncio.Event
) -> Client:
    rng = random.Random(port * 1000 + number)
    began_s = time.perf_counter()
    while not over.is_set():
        story = rng.randrange(STORIES)
        try:
            received = await ask(port, *load.body(story))
        except OSError as error:
            received = Received(error=str(error))
        if received.status == 200:
            client.waits_s.append(received.sent_s + received.first_s - began_s)
            _take(client, read_answer(received), expected[story], late=over.is_set())
            began_s = time.perf_counter()
        else:
            client.refused[received.status] += 1
            client.refused_after_s.append(received.first_s if received.pieces else 0.0)
            await _passed(over, _come_back_s(client, received))
    return client


def _take(client: Client, answer: Answer, expected: Answer, *, late: bool) -> None:
    """Count right answers while all clients ask: what comes `late` is of the longest queue."""
    client.resumed += answer.resumed
    if answer.wrong:
        client.errors.add(answer.wrong)
    elif difference(expected, answer):
        client.wrong += 1
    elif not late:
        client.completed += 1


def _come_back_s(client: Client, received: Received) -> float:
    told = re.search(r"retry-after: (\d+)", received.head(), re.IGNORECASE)
    if received.status == 429 and told is None:
        client.unguided += 1
    return float(told.group(1)) if told else COME_BACK_S


def judge(clients: list[Client], pages: list[str]) -> dict[str, Any]:
    """What was seen, flat; `pages` are the frontends' /metrics at the end."""
    refused = sum((client.refused for client in clients), Counter[int]())
    by_frontend = [
        sum(client.completed for client in clients if client.frontend == frontend)
        for frontend in sorted({client.frontend for client in clients})
    ]
    return {
        "completed": sum(by_frontend),
        **{f"completed_frontend_{number}": count for number, count in enumerate(by_frontend)},
        "unfairness": round(max(by_frontend) / max(1, min(by_frontend)), 2),
        "clients_starved": sum(not client.completed for client in clients),
        "refused_429": refused[429],
        "refused_otherwise": refused.total() - refused[429],
        "refused_without_retry_after": sum(client.unguided for client in clients),
        "refused_after_s_max": _most(client.refused_after_s for client in clients),
        "wait_s_max": _most(client.waits_s for client in clients),
        "wrong": sum(client.wrong for client in clients),
        "lost": sum(len(client.errors) for client in clients) + _counted("holdfast_streams_lost_total", pages),
        "resumed": sum(client.resumed for client in clients),
        "migrations_counted": _counted("dynamo_migration_total", pages),
        "errors": sorted(set().union(*(client.errors for client in clients)))[:3],
        "statuses": {str(status): count for status, count in sorted(refused.items())},
    }


def _most(of_clients: Any) -> float:
    return round(max((max(values, default=0.0) for values in of_clients), default=0.0), 2)


def _counted(name: str, pages: list[str]) -> int:
    return sum(int(float(value)) for page in pages for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.M))


class OverloadOptions(CommandOptions, frozen=True):
    """Overload workers from two frontends with 3:1 clients; count requests served, refused and lost."""

    seconds: Annotated[float, about("Duration of the load.", "s", min=1)] = 60.0
    workers: Annotated[int, about("Number of sim workers.", min=1)] = 1
    load: Annotated[
        float, about("Clients per place; places are the running plus the queued streams that workers take.", min=0.1)
    ] = 2.0
    kill_every_s: Annotated[float, about("Time between kills of a worker; 0: no kills.", "s", min=0)] = 0.0
    seed: Annotated[int, about("Random seed for the requests and for which worker is killed.")] = 1
    json: Json = False

    def run(self, env: Environment) -> int:
        pace: dict[str, Any] = {"load": self.load, "kill_every_s": self.kill_every_s, "seed": self.seed}
        return show(run(OverloadBench(self.seconds, self.workers, **pace), tell), self.json)


if __name__ == "__main__":
    main(OverloadOptions, "overload")
