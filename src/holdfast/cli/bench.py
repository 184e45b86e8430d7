"""`holdfast bench`: the commands behind every published figure."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Annotated, Any

from holdfast.cli.arguments import Asked, Json
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.settings import Environment
from holdfast.spec.settings import about

PART = (r"[1-9]\d{0,3}/[1-9]\d{0,3}", "which of how many, like 2/8")


class Frontend(Asked, frozen=True):
    """`holdfast bench frontend`."""

    streams: Annotated[int, about("Number of concurrent streams.", min=1)] = 32
    pace_ms: Annotated[float, about("Time per token; 0: as fast as possible.", "ms", min=0)] = 0.0
    requests: Annotated[int, about("Total number of requests; 0: enough for a few seconds.", min=0)] = 0
    workers: Annotated[int, about("Number of workers.", min=1)] = 2
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.frontend import FrontendBench, run

        return _show(run(FrontendBench(self.streams, self.pace_ms, self.requests, self.workers)), self.json)


class Memory(Asked, frozen=True):
    """`holdfast bench memory`."""

    device: Annotated[str, about("Device: host-0, a GPU's UUID (nvidia-smi -L), or cuda-0.")] = "host-0"
    gib: Annotated[float, about("Size of the weights.", "GiB", min=0.002)] = 2.0
    slab_mib: Annotated[
        int, about("Slab size, a multiple of 2; remapping takes longer with more slabs.", "MiB", min=2)
    ] = 1024
    rounds: Annotated[int, about("Number of unmap/remap rounds.", min=1)] = 50
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.memory import MemoryBench, run
        from holdfast.cli.progress import loading

        if self.slab_mib % 2:
            raise UserError(f"--slab-mib must be a multiple of 2, the granularity of every device; got {self.slab_mib}")
        with loading(f"writing {self.gib:g} GiB to {self.device}") as progress:
            result = run(MemoryBench(self.device, self.gib, self.slab_mib, self.rounds), progress)
        return _show(result, self.json)


class Warm(Asked, frozen=True):
    """`holdfast bench warm`."""

    device: Annotated[str, about("Device: host-0, a GPU's UUID (nvidia-smi -L), or cuda-0.")] = "host-0"
    gib: Annotated[float, about("Size of the weights; needs the same amount of host memory.", "GiB", min=0.002)] = 1.0
    rounds: Annotated[int, about("Number of demote/promote rounds.", min=1)] = 5
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.warm import WarmBench, run
        from holdfast.cli.progress import loading

        with loading(f"writing {self.gib:g} GiB to {self.device}") as progress:
            result = run(WarmBench(self.device, self.gib, self.rounds), progress)
        return _show(result, self.json)


class Failover(Asked, frozen=True):
    """`holdfast bench failover`."""

    rounds: Annotated[int, about("Number of times the active engine is killed.", min=1)] = 200
    streams: Annotated[int, about("Number of concurrent clients; 0: 16 with sim, 12 with torch.", min=0)] = 0
    tokens: Annotated[int, about("Tokens per answer; 0: 200 with sim, 150 with torch.", min=0)] = 0
    vault_gib: Annotated[
        float, about("sim: memory of the engine in the vault, weights and KV pool.", "GiB", min=0.01)
    ] = 0.25
    seed: Annotated[int, about("Random seed for when and how the engine is killed.")] = 1
    engine: Annotated[str, about("Engine: sim, or torch with the tiny model.", choices=("sim", "torch"))] = "sim"
    exact: Annotated[
        bool, about("torch: --exact computes independently of the batch; --fast is quicker.", flag="--exact/--fast")
    ] = True
    kv: Annotated[
        str, about("torch: KV pool in the vault, or in the engine itself (direct).", choices=("vault", "direct"))
    ] = "vault"
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.engine_kills import engine_bench
        from holdfast.bench.failover import run, sim_bench

        if self.engine == "torch":
            streams, tokens = self.streams or 12, self.tokens or 150
            bench = engine_bench(self.rounds, streams, tokens, seed=self.seed, exact=self.exact, kv=self.kv)
        else:
            streams, tokens = self.streams or 16, self.tokens or 200
            bench = sim_bench(self.rounds, streams, tokens, vault_gib=self.vault_gib, seed=self.seed)
        return _show(run(bench, _tell), self.json)


class Overload(Asked, frozen=True):
    """`holdfast bench overload`."""

    seconds: Annotated[float, about("Duration of the load.", "s", min=1)] = 60.0
    workers: Annotated[int, about("Number of sim workers.", min=1)] = 1
    load: Annotated[
        float, about("Clients per place; places are the running plus the queued streams that workers take.", min=0.1)
    ] = 2.0
    kill_every_s: Annotated[float, about("Time between kills of a worker; 0: no kills.", "s", min=0)] = 0.0
    seed: Annotated[int, about("Random seed for the requests and for which worker is killed.")] = 1
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.overload import OverloadBench, run

        pace: dict[str, Any] = {"load": self.load, "kill_every_s": self.kill_every_s, "seed": self.seed}
        return _show(run(OverloadBench(self.seconds, self.workers, **pace), _tell), self.json)


class Health(Asked, frozen=True):
    """`holdfast bench health`."""

    only: Annotated[str, about("Run only these faults, separated by commas.")] = ""
    pairs: Annotated[bool, about("Inject every two faults at once; takes half an hour.")] = False
    soak: Annotated[
        str, about("Inject no faults; overload workers and CPU cores for this long, e.g. 10m, and expect no alarm.")
    ] = ""
    part: Annotated[str, about("Run only one of several equal parts, e.g. 2/8.", like=PART)] = "1/1"
    limit_s: Annotated[float, about("Start no further case after this time; 0: no limit.", "s", min=0)] = 0.0
    canary_interval_s: Annotated[float, about("Time between canary checks of each worker.", "s", over=0)] = 5.0
    seed: Annotated[int, about("Random seed for the requests and for which worker gets the fault.")] = 1
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.health.faults import BY_NAME, FAULTS
        from holdfast.bench.health.judging import table
        from holdfast.bench.health.run import HealthBench, run
        from holdfast.bench.health.soak import soak

        names = [name.strip() for name in self.only.split(",") if name.strip()]
        if unknown := [name for name in names if name not in BY_NAME]:
            raise UserError(f"--only {unknown[0]}: there is {', '.join(BY_NAME)}")
        faults = tuple(BY_NAME[name] for name in names) or FAULTS
        which, parts = map(int, self.part.split("/"))
        if not 1 <= which <= parts:
            raise UserError(f"--part {self.part}: the first of eight is 1/8, the last 8/8")
        some: dict[str, Any] = {"part": (which, parts), "limit_s": self.limit_s or math.inf}
        bench = HealthBench(faults, self.pairs, self.seed, canary_interval_s=self.canary_interval_s, **some)
        result = soak(bench, seconds("--soak", self.soak), _tell) if self.soak else run(bench, _tell)
        if self.json or self.soak:
            _show(result, self.json)
        else:
            write_out(table(result))
        return 1 if result["missed"] else 0


class Degrade(Asked, frozen=True):
    """`holdfast bench degrade`."""

    workers: Annotated[int, about("Number of sim workers.", min=10, max=100)] = 10
    seed: Annotated[int, about("Random seed for when clients start.")] = 1
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.degrade.run import DegradeBench, run
        from holdfast.bench.degrade.telling import table

        result = run(DegradeBench(self.workers, seed=self.seed), _tell)
        if self.json:
            _show(result, True)
        else:
            write_out(table(result))
        return 1 if result["missed"] else 0


class Engine(Asked, frozen=True):
    """`holdfast bench engine`."""

    model: Annotated[str, about("Model: default, tiny, a directory of safetensors, or a .gguf file.")] = "default"
    streams: Annotated[str, about("Number of concurrent streams; several runs are separated by commas.")] = "1,8"
    tokens: Annotated[int, about("Output tokens per stream.")] = 128
    prompt_tokens: Annotated[int, about("Average prompt length in tokens.")] = 64
    compare: Annotated[str, about("transformers: also measure its `generate`, alternating with ours.")] = ""
    repeats: Annotated[int, about("Number of rounds; results are medians.")] = 5
    threads: Annotated[int, about("CPU threads of torch; 0: all cores but one, as in the engine.")] = 0
    json: Json = False

    def run(self, env: Environment) -> int:
        from holdfast.bench.engine.figures import table
        from holdfast.bench.engine.speed import EngineBench, run
        from holdfast.cli.checks import check_engine

        check_engine("torch")
        try:
            counts = tuple(int(count) for count in self.streams.split(","))
        except ValueError:
            raise UserError(f"--streams are whole numbers with commas between, like 1,8; got {self.streams}") from None
        shape = (self.model, counts, self.tokens, self.prompt_tokens, self.compare, self.repeats, self.threads)
        result = run(EngineBench(env.cache_dir, *shape), _tell)
        if self.json:
            return _show(result, True)
        write_out(table(result))
        return 0


def seconds(flag: str, text: str) -> float:
    """`90`, `90s`, `10m` or `2h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise UserError(f"{flag} is a time such as 90s, 10m or 2h; got {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(result: dict[str, Any], as_json: bool) -> int:
    if as_json:
        write_out(json.dumps(result) + "\n")
        return 0
    width = max(map(len, result))
    for name, value in result.items():
        write_out(f"{name:<{width}}  {value}\n")
    return 0
