"""All that is measured of the torch engine on a GPU: `python -m bench.engine_gpu.measure --out DIR`.

Parts: `chain` (kills under load), `speed` (our decode), `vllm` (stock vLLM's, where it is installed). Each is a process
of its own with a bound on its time, and writes what it has as it goes; after each, all that lies in DIR becomes
DIR/engine-gpu.json, so runs on several days and machines can be put together by `--parts merge`. On `--device host-0`
the same parts run without a GPU, smaller, to try the bench itself. Exits with 1 if a part failed or missed its bound.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import ROOT
from bench.engine_gpu.words import Row, speed_ratio
from bench.gpu.smi import machine
from bench.prove import about_run, write_rows
from holdfast.spec.names import is_host

RESULTS = "engine-gpu.json"
PARTS = ("chain", "speed", "vllm")
MODULES = {"chain": "chain", "speed": "speed", "vllm": "vllm_speed"}
# Seconds. A command on a lent GPU may take ten minutes; the chain ends by itself before its bound, and reads answers.
BOUNDS_S = {"chain": 540.0, "speed": 300.0, "vllm": 500.0}
END_S = 40.0  # after Ctrl-C: a deployment that is asked to stop needs ten seconds (`spec.jobs`)
# A small machine without a GPU: seconds, for trying.
SMALL = {
    "chain": ["--kv-gib", "0.25", "--prompt", "500", "--tokens", "1200", "--up", "--torch-threads 1"],
    "speed": ["--kv-gib", "0.25", "--step-tokens", "512", "--repeats", "1", "--cases", "1x128,4x300"],
}


def command(part: str, asked: argparse.Namespace) -> list[str]:
    """A part's own; what is said here comes after what suits a small machine, and so counts."""
    words = [sys.executable, "-m", f"bench.engine_gpu.{MODULES[part]}", "--out", str(asked.out.resolve())]
    if part == "vllm":
        return words
    words += SMALL[part] if is_host(asked.device) else []
    words += ["--model", asked.model, "--device", asked.device]
    if part == "chain":
        words += ["--streams", str(asked.streams), "--kills", str(asked.kills), "--standbys", str(asked.standbys)]
        words += [f"--up={asked.up}"] if asked.up else []
    return words


def run_part(command: list[str], bound_s: float) -> str:
    """Why it did not end well, or ""."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        status = process.wait(bound_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that what it started ends too
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
        return f"did not end within {bound_s:g} s"
    return "" if status == 0 else f"ended with {status}"


def write(out: Path, about: Row) -> dict[str, Row]:
    """Rows of all parts there are; those of an earlier run stay where this one has none."""
    path = out / RESULTS
    before = json.loads(path.read_text()) if path.exists() else {"about": {}, "rows": {}}
    rows: dict[str, Row] = before["rows"]
    for part in PARTS:
        if (found := out / f"{part}.json").exists():
            rows |= json.loads(found.read_text())
    ratio = speed_ratio(rows.get("speed", {}).get("cases", {}), rows.get("vllm", {}).get("cases", {}))
    rows |= {"decode-against-vllm": ratio} if ratio else {}
    write_rows(path, before["about"] | about, rows)
    return rows


def run(asked: argparse.Namespace, parts: Sequence[str], about: Row) -> bool:
    """Whether every part asked for ended well."""
    well = True
    for part in parts:
        words = command(part, asked)
        print(f"== {part}: {' '.join(words)}", flush=True)
        (asked.out / f"{part}.json").unlink(missing_ok=True)  # of an earlier try: not what this one found
        began_s = time.monotonic()
        why = run_part(words, BOUNDS_S[part])
        well = well and not why
        print(f"== {part}: {why or 'well'}, {time.monotonic() - began_s:.0f} s", flush=True)
        write(asked.out, about)
    return well


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="chain,speed", help=f"of {', '.join(PARTS)}; merge: none, only put together")
    parser.add_argument("--model", default="", help="default: random:8b, on a host device tiny")
    parser.add_argument("--device", default="cuda-0", help="cuda-0, a GPU's UUID, or host-0 (also: cpu)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--standbys", type=int, default=2)
    parser.add_argument("--up", default="", help="other words for `holdfast up`, in one string: --up='--wake-s 10'")
    asked = parser.parse_args(argv)
    parts = tuple(part for part in asked.parts.split(",") if part != "merge")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; there are: {', '.join(PARTS)}, merge")
    asked.device = "host-0" if asked.device == "cpu" else asked.device
    asked.model = asked.model or ("tiny" if is_host(asked.device) else "random:8b")
    words = " ".join(["python -m bench.engine_gpu.measure", *argv])
    about = about_run(words, machine(asked.device)) if parts else {}
    well = run(asked, parts, about)
    for name, row in write(asked.out, about).items():
        shown = {key: value for key, value in row.items() if key != "each"}
        print(f"{name:20} {'met' if row.get('met', True) else 'MISSED'} {json.dumps(shown)[:3000]}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
