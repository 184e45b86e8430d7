"""A chain of kills under load, `python -m bench.engine_gpu.chain --out DIR`: what clients see of each.

`holdfast up` with the torch engine, standbys started ahead, streams with long prompts. First the same requests
unbroken; then, again and again, SIGKILL to the active engine's group. Always true: a kill comes only while a standby is
ready, every stream decodes and the leader has led for a while; around it nobody is asked anything, so that no question
delays what is measured; every kill is written down as soon as it is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from bench.engine_gpu.client import Clients, unbroken
from bench.engine_gpu.words import Judged, Kill, Row, chain_row, common, prompt_ids, takeover_marks
from bench.gpu.smi import DeviceMemory, device_memory, gpu_uuid
from holdfast.core.errors import UserError
from holdfast.failover.journal import two_leaders
from holdfast.spec.names import is_host
from holdfast.testing.answers import Answer
from holdfast.testing.clients import read_answer
from holdfast.testing.load import failures
from holdfast.testing.place import EngineSeen
from holdfast.testing.processes import kill_group
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread, until

NAME = "bench"  # what the model is served as
POLL_S = 0.25  # seldom enough that asking four status pages is no load
SEEN, LEFT = 16, 200  # tokens a stream has had before a kill, and has before it: seconds, beside a takeover's tenths
AFTER = 32  # tokens of every stream after a kill, until it is over for clients
AFTER_S = 60.0  # for those; streams are held for 30 s and then failed by name
# A leader's word that its KV may be believed comes a second after its takeover, and one that dies younger than two
# seconds looks to the supervisor like a crash (`engines.shadow.proving`, `supervise.machine`).
SETTLED_S = 2.5
AHEAD_S = 45.0  # for all standbys to be ready again, so that no start disturbs the next kill; then one is enough
STANDBY_S = 120.0  # for one: the supervisor's own bound of a start
LOG_CHARS = 100_000
ENDS_S = 40.0  # kept for the last answers' ends: 2,000 tokens at 15 ms and some
FENCE_S = 5.0  # the GPU fence's mark comes within half a second (facts 4a)


@dataclass(frozen=True, slots=True)
class ChainBench:
    """What is started, asked and killed."""

    model: str = "random:8b"
    device: str = "cuda-0"
    streams: int = 32
    kills: int = 10
    prompt: int = 2000
    tokens: int = 2000
    standbys: int = 2
    kv_gib: float = 40.0
    start_s: float = 300.0  # weights are made at the first load
    limit_s: float = 480.0  # for all; whoever lends the GPU lends it for minutes
    more: tuple[str, ...] = ()  # other words for `holdfast up`

    def options(self) -> tuple[str, ...]:
        host = is_host(self.device)
        device = ("--device", "cpu" if host else self.device)
        sizes = ["--kv-gib", f"{self.kv_gib:g}", "--standbys", str(self.standbys)]
        # A canary rides beside the streams after a takeover: without a place of its own one of them would wait for it.
        if self.streams >= (32 if host else 64):
            sizes += ["--streams-max", str(self.streams + 1)]
        what = ("--engine", "torch", "--model", self.model, "--served-name", NAME, "--fast")
        return (*what, *device, *sizes, *self.more)

    def body(self, number: int) -> bytes:
        asked: Row = {
            "model": NAME,
            "prompt": prompt_ids(number, self.prompt),
            "max_tokens": self.tokens,
            "temperature": 0.8 if number % 2 else 0,
            "seed": 1000 + number,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return json.dumps(asked).encode()


@dataclass(slots=True)
class _Run:
    bench: ChainBench
    up: Supervised
    clients: Clients
    gpu: str
    keep: Callable[[Row], None]
    deadline_s: float
    expected: list[Answer] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    head: Row = field(default_factory=dict)
    stopped: str = ""


def run(bench: ChainBench, keep: Callable[[Row], None], logs: Path) -> Row:
    """All of it; `keep` hears the row as it grows."""
    deadline_s = time.monotonic() + bench.limit_s
    gpu = gpu_uuid(bench.device)
    began_s = time.monotonic()
    with Supervised(*bench.options(), start_s=bench.start_s) as up:
        clients = Clients(up.port, [bench.body(number) for number in range(bench.streams)], bench.tokens)
        state = _Run(bench, up, clients, gpu, keep, deadline_s)
        state.head = {"model": bench.model, "streams": bench.streams, "prompt_tokens": bench.prompt}
        state.head |= {"answer_tokens": bench.tokens, "standbys": bench.standbys}
        state.head["start_s"] = round(time.monotonic() - began_s, 1)
        try:
            return uvloop.run(_run(state))
        finally:
            logs.write_text(up.logs(LOG_CHARS))


async def _run(state: _Run) -> Row:
    clients = state.clients
    await clients.open()
    await _standbys(state, state.bench.standbys, STANDBY_S)
    state.head |= await _device(state)
    state.keep(state.head)
    clients.forget_gaps()
    received = await asyncio.wait_for(clients.once(), state.deadline_s - time.monotonic())
    state.head["unbroken_worst_gap_ms"] = clients.worst_gap_ms()
    state.expected = [read_answer(one) for one in received]
    state.head |= unbroken(state.expected, received)
    state.keep(state.head)
    clients.forget_gaps()
    asking = [asyncio.ensure_future(clients.keep_asking(number)) for number in range(state.bench.streams)]
    try:
        await _kills(state)
    except TimeoutError as error:
        state.stopped = str(error)[-1500:] or "the time was over"
    clients.over = True
    unfinished = await _end(state, asking)
    answers = [(number, read_answer(one)) for number, one in clients.received]
    judged = [_judged(state, number, answer) for number, answer in answers]
    row = state.head | chain_row(state.kills, judged, state.bench.kills) | {"each": [asdict(k) for k in state.kills]}
    row |= {"unfinished": unfinished, "stopped": state.stopped, "errors": failures(answer for _, answer in answers)}
    row["two_leaders"] = len(two_leaders(state.up.terms()))
    row["met"] = row["met"] and not row["two_leaders"] and not row["stopped"]
    state.keep(row)
    return row


async def _end(state: _Run, asking: Sequence[asyncio.Future[None]]) -> int:
    """Answers under way come to their ends if there is time; how many did not."""
    left_s = max(1.0, state.deadline_s - time.monotonic())
    _, pending = await asyncio.wait(asking, timeout=left_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    state.clients.close()
    return len(pending)


# -- kills


async def _kills(state: _Run) -> None:
    for number in range(1, state.bench.kills + 1):
        if time.monotonic() > state.deadline_s - ENDS_S:
            raise TimeoutError(f"the time was over after {number - 1} kills")
        ready = await _standbys(state, 1, STANDBY_S)
        if not ready:
            raise TimeoutError("no standby was ready")
        await asyncio.sleep(SETTLED_S)
        await _until(state, lambda: state.clients.decoding(SEEN, LEFT), "all streams to decode", AFTER_S)
        kill = await _kill(state, ready)
        state.kills.append(kill)
        shown = {key: value for key, value in asdict(kill).items() if value is not None}
        print(f"kill {number} of {state.bench.kills}: {json.dumps(shown)}", file=sys.stderr, flush=True)
        row = state.head | chain_row(state.kills, [], state.bench.kills) | {"each": [asdict(k) for k in state.kills]}
        state.keep(row | {"met": False, "stopped": "under way"})


async def _kill(state: _Run, ready: int) -> Kill:
    clients = state.clients
    active = await in_thread(state.up.active)
    before = await in_thread(device_memory, state.gpu)
    await _until(state, lambda: clients.decoding(SEEN, LEFT), "all streams to decode", AFTER_S)
    calm_ms = clients.worst_gap_ms()
    clients.forget_gaps()
    killed_s = time.monotonic()
    kill_group(active.pid)
    await _until(state, lambda: clients.moved_on(AFTER), "every stream to go on after a kill", AFTER_S)
    gap_ms = clients.worst_gap_ms()
    clients.forget_gaps()
    leader = await _leader(state, active.pid)
    dead = await in_thread(device_memory, state.gpu)
    failover = leader.facts.get("failover") or {}
    again = await _standbys(state, ready, AHEAD_S)
    again_s = round(time.monotonic() - killed_s, 1) if again else None
    after = await in_thread(device_memory, state.gpu)
    return Kill(
        gap_ms,
        calm_ms,
        takeover_marks(failover, killed_s),
        leader.facts["recomputed_tokens_max"],
        ready,
        blocks=failover.get("blocks"),
        why_empty=failover.get("why_empty") or "",
        standby_again_s=again_s,
        freed_mib=before.over(dead),
        standby_mib=after.over(dead) if again else None,
    )


async def _leader(state: _Run, but_not: int) -> EngineSeen:
    """The new one, once its timeline is whole; on a host device there may be no last mark, and the bound passes."""
    until_s = time.monotonic() + FENCE_S
    while True:
        leader: EngineSeen | None = await in_thread(state.up.engine, "active")
        known = leader is not None and leader.pid != but_not
        if leader is not None and known and "gpu_fence_ms" in (leader.facts.get("failover") or {}):
            return leader
        if time.monotonic() > until_s:
            if leader is None or not known:
                raise TimeoutError("no engine leads after a kill")
            return leader
        await asyncio.sleep(POLL_S)


async def _standbys(state: _Run, wanted: int, within_s: float) -> int:
    """Wait until so many are ready beside an active; how many are, 0 if that took too long."""
    until_s = min(time.monotonic() + within_s, state.deadline_s)
    while True:
        engines = await in_thread(state.up.engines)
        ready = sum(engine.state == "standby" and engine.facts["ready"] for engine in engines)
        if ready >= wanted and any(engine.state == "active" for engine in engines):
            return int(ready)
        if time.monotonic() > until_s:
            return 0
        await asyncio.sleep(POLL_S)


async def _until(state: _Run, true: Callable[[], bool], what: str, within_s: float) -> None:
    left_s = state.deadline_s - time.monotonic()
    try:
        await until(true, what, max(0.0, min(within_s, left_s)))  # its own streams are looked at, nobody is asked
    except TimeoutError as error:
        raise TimeoutError(f"{error}; tokens {[stream.tokens for stream in state.clients.streams]}") from None


# -- figures


async def _device(state: _Run) -> Row:
    """What the device holds with all engines ready. A process may be charged for the vault's pages that it maps."""
    memory: DeviceMemory = await in_thread(device_memory, state.gpu)
    states = {engine.pid: engine.state for engine in await in_thread(state.up.engines)}
    return {"kv_gib": state.bench.kv_gib} | memory.facts(states)


def _judged(state: _Run, number: int, answer: Answer) -> Judged:
    same = common(answer.tokens, state.expected[number].tokens)
    return Judged(answer.resumed, bool(answer.wrong), len(answer.tokens), state.bench.tokens, same)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine_gpu_chain", description=__doc__)
    plain = ChainBench()
    parser.add_argument("--out", type=Path, required=True, help="a folder: chain.json and chain-logs.txt go there")
    for name in ("model", "device", "streams", "kills", "prompt", "tokens", "standbys", "kv_gib", "start_s", "limit_s"):
        value = getattr(plain, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--up", default="", help="other words for `holdfast up`, in one string")
    asked = vars(parser.parse_args(argv))
    out, more = asked.pop("out"), tuple(asked.pop("up").split())
    out.mkdir(parents=True, exist_ok=True)

    kept: Row = {}

    def keep(row: Row) -> None:
        kept.update(row)
        (out / "chain.json").write_text(json.dumps({"chain": kept}, indent=1) + "\n")

    try:
        row = run(ChainBench(**asked, more=more), keep, out / "chain-logs.txt")
    except (TimeoutError, UserError) as error:
        keep({"failed": str(error)[-6000:], "met": False, "bound": "it runs"})
        print(f"chain failed: {error}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps({key: value for key, value in row.items() if key != "each"}), flush=True)
    return 0 if row["met"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
