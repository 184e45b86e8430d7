"""`python -m bench.compare_trees BEFORE AFTER`: compares two checkouts in one sitting, alternating, on one machine.

Each round runs both trees, first one and then the other first, so that a slow minute hits both. Figures: the frontend's
CPU time per 1,000 streamed tokens, the stall that clients see when the active engine is killed, the torch engine's
decoding speed on CPU with the tiny model, and the time from `holdfast up` to its first answer. The result is a table of
medians with the ratio after / before, the ratio of the best rounds, and a JSON file with every round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.testing.rig import free_port

RUN_S = 240  # a part that takes longer than this hangs
UP_S = 60
POLL_S = 0.005  # small against a start of seconds


def environment(tree: Path, state: Path) -> dict[str, str]:
    """Return the variables of a process that runs a tree's code with a state directory of its own."""
    path = os.pathsep.join((str(tree / "src"), str(tree)))
    return os.environ | {"PYTHONPATH": path, "HOLDFAST_STATE_DIR": str(state)}


def bench(tree: Path, name: str, *options: str) -> dict[str, Any]:
    """Run one of a tree's benchmarks, by the name it has in that tree, and return its JSON."""
    module = tree / "bench" / name
    moved = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    command = ["-m", f"bench.{name}"] if moved else ["-m", "holdfast", "bench", name]
    with tempfile.TemporaryDirectory() as state:
        done = subprocess.run(
            [sys.executable, *command, *options, "--json"],
            cwd=tree,
            env=environment(tree, Path(state)),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{tree}: {name} exits with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def frontend(tree: Path) -> dict[str, float]:
    """Return the frontend's CPU time per 1,000 streamed tokens."""
    return {"frontend, CPU ms per 1,000 tokens": bench(tree, "frontend", "--streams", "32")["cpu_ms_per_1k_tokens"]}


def failover(tree: Path) -> dict[str, float]:
    """Return the stall of a killed engine's streams, less the longest gap of the unbroken ones."""
    result = bench(tree, "failover", "--rounds", "6")
    if result["streams_lost"] or result["tokens_wrong"]:
        raise SystemExit(f"{tree}: the kills lost or changed answers: {result}")
    return {"failover, stall p50 ms": result["stall_ms_p50"], "failover, stall max ms": result["stall_ms_max"]}


def engine(tree: Path) -> dict[str, float]:
    """Return tokens per second of the torch engine, tiny model, 8 streams."""
    result = bench(tree, "engine", "--model", "tiny", "--streams", "8", "--repeats", "3", "--threads", "2")
    (row,) = result["rows"]
    return {f"engine --{way}, tokens/s": row[f"{way}_tokens_per_s"] for way in ("fast", "exact")}


def up(tree: Path) -> dict[str, float]:
    """Return the seconds from `holdfast up` with two sim engines to its first answer."""
    with tempfile.TemporaryDirectory() as state:
        port = free_port()
        command = [sys.executable, "-m", "holdfast", "up", "--engine", "sim", "--port", str(port)]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment(tree, Path(state)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _first_answer(port, began + UP_S)
            return {"up to the first answer, s": time.monotonic() - began}
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _first_answer(port: int, until: float) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    while time.monotonic() < until:
        try:
            url = f"http://127.0.0.1:{port}/v1/models"
            with urllib.request.urlopen(url, timeout=5) as answer:
                models = json.load(answer)["data"]
            if models:
                whole = json.loads(body) | {"model": models[0]["id"]}
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(whole).encode(), headers
                )
                with urllib.request.urlopen(request, timeout=UP_S) as answer:
                    answer.read()
                return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(POLL_S)
    raise SystemExit(f"no answer within {UP_S} s of `holdfast up`")


PARTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "frontend": frontend,
    "up": up,
    "failover": failover,
    "engine": engine,
}


def compare(before: Path, after: Path, parts: list[str], rounds: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Run all rounds of all parts, and save after each what is known."""
    figures: dict[str, dict[str, list[float]]] = {}
    for part in parts:
        for number in range(rounds):
            pair = {"before": before, "after": after}
            for name in sorted(pair, reverse=number % 2 == 0):
                for figure, value in PARTS[part](pair[name]).items():
                    figures.setdefault(figure, {"before": [], "after": []})[name].append(round(value, 4))
                print(f"{part}, round {number + 1} of {rounds}: {name} done", file=sys.stderr, flush=True)
            save({figure: _row(figure, values) for figure, values in figures.items()})


def _row(figure: str, values: dict[str, list[float]]) -> dict[str, Any]:
    best = max if "tokens/s" in figure else min  # a busy neighbour only ever makes a round worse
    before, after = (statistics.median(values[name]) for name in ("before", "after"))
    return {
        "before": before,
        "after": after,
        "after_to_before": round(after / before, 3),
        "best_to_best": round(best(values["after"]) / best(values["before"]), 3),
        "rounds": values,
    }


def main() -> None:
    """Parse the command line, compare, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare_trees", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("before", type=Path, help="a checkout (git worktree add DIR COMMIT)")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--parts", default=",".join(PARTS), help="which figures, with commas between (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each part (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/compare-trees.json"), help="the JSON file")
    asked = parser.parse_args()
    head = {
        "command": " ".join(["python -m bench.compare_trees", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    shown: dict[str, Any] = {}

    def save(figures: dict[str, Any]) -> None:
        shown.update(figures)
        asked.out.write_text(json.dumps(head | {"figures": shown}, indent=2) + "\n")

    compare(asked.before.resolve(), asked.after.resolve(), asked.parts.split(","), asked.rounds, save)
    width = min(shutil.get_terminal_size().columns, 120) - 40
    for figure, row in shown.items():
        ratios = f"{row['after_to_before']:>8} {row['best_to_best']:>8}"
        print(f"{figure:<{width}} {row['before']:>10} {row['after']:>10} {ratios}")


if __name__ == "__main__":
    main()
