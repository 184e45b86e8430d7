"""All that is measured of the torch engine on a GPU: `python -m bench.engine_gpu.measure --out DIR`.

Parts: `chain` (kills under load), `speed` (our decode), `canaries` (how far batches move known answers; of a model that
has been trained, so say `--model`), `vllm` (stock vLLM's, where it is installed). Each writes what
it has to DIR/PART.json as it goes; after each, all that lies in DIR becomes DIR/engine-gpu.json, so runs on several
days and machines can be put together by `--parts merge`. On `--device host-0` the same parts run without a GPU,
smaller, to try the bench itself. To bound its time, end it by SIGTERM. Exits with 1 if a part failed or missed
its bound.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench.engine_gpu.words import CONTEXT, SAME_AIM, Case, Keep, Row, speed_ratio
from bench.prove import about_run, machine_of, write_rows
from holdfast.spec.names import is_host

RESULTS = "engine-gpu.json"
PARTS = ("chain", "speed", "canaries", "vllm", "vllm-chain", "vllm-speed")


def run_part(part: str, asked: argparse.Namespace, keep: Keep) -> Row:
    """Each loads what it needs alone: vLLM runs where our packages may not be."""
    where = {"model": asked.model, "device": asked.device}
    small: dict[str, Any] = {"kv_gib": 0.25} if is_host(asked.device) else {}  # seconds, for trying
    if part.startswith("vllm-"):
        where |= {"engine": "vllm", "model": asked.folder}
        part = part.removeprefix("vllm-")
    if part == "chain":
        from bench.engine_gpu import chain

        small |= {"prompt": 500, "tokens": 1200, "up": "--torch-threads 1"} if small else {}
        if "engine" in where:
            small |= {"up": f"--context {CONTEXT}", "start_s": asked.start_s}
        small |= {"up": asked.up} if asked.up else {}
        many = {"streams": asked.streams, "kills": asked.kills, "standbys": asked.standbys, "limit_s": asked.limit_s}
        many |= {"sampling": asked.sampling, "ahead_s": asked.ahead_s}
        return chain.run(chain.ChainBench(**where, **many, **small), keep)
    if part == "speed":
        from bench.engine_gpu import speed

        small |= {"step_tokens": 512, "repeats": 1, "cases": (Case(1, 128), Case(4, 300))} if small else {}
        return speed.run(speed.SpeedBench(**where, **small), keep)
    if part == "canaries":
        from bench.engine_gpu import canaries

        small |= {"loads": (0, 1, 3), "sets": 4} if small else {}
        return canaries.run(canaries.CanaryBench(**where, **small), keep)
    from bench.engine_gpu import vllm_speed

    return vllm_speed.run(asked.mode, keep)


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
    ratio = speed_ratio(rows.get("vllm-speed", {}).get("cases", {}), rows.get("vllm", {}).get("cases", {}), SAME_AIM)
    rows |= {"vllm-against-stock": ratio} if ratio else {}
    write_rows(path, before["about"] | about, rows)
    return rows


def run(part: str, asked: argparse.Namespace) -> bool:
    """Whether it ended well; if not, why is in its file."""
    print(f"== {part}", flush=True)
    (asked.out / f"{part}.json").unlink(missing_ok=True)  # of an earlier try: not what this one found
    keep, began_s = Keep(asked.out, part), time.monotonic()
    try:
        well = bool(run_part(part, asked, keep).get("met", True))
    except Exception as error:  # whatever it was, the other parts are still worth their GPU time
        keep({"failed": str(error)[-6000:], "met": False, "bound": "it runs"})
        print(f"{part} failed: {error}", file=sys.stderr, flush=True)
        well = False
    print(f"== {part}: {'well' if well else 'not well'}, {time.monotonic() - began_s:.0f} s", flush=True)
    return well


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="chain,speed", help=f"of {', '.join(PARTS)}; merge: none, only put together")
    parser.add_argument("--model", default="", help="default: random:8b, on a host device tiny")
    parser.add_argument("--folder", default="", help="for vllm-…: a model's directory (bench.engine_gpu.random_model)")
    parser.add_argument("--device", default="cuda-0", help="cuda-0, a GPU's UUID, or host-0 (also: cpu)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--standbys", type=int, default=2)
    parser.add_argument("--sampling", default="plain", choices=("plain", "mixed"), help="of the chain's streams")
    parser.add_argument("--ahead-s", type=float, default=45.0, help="wait this long for all standbys before each kill")
    parser.add_argument("--limit-s", type=float, default=480.0, help="for a whole chain")
    parser.add_argument("--start-s", type=float, default=240.0, help="for vLLM's engines to be ready")
    parser.add_argument("--up", default="", help="other words for `holdfast up`, in one string: --up='--wake-s 10'")
    parser.add_argument("--mode", default="stock", help="how vLLM runs: stock, graphs or eager")
    asked = parser.parse_args(argv)
    parts = tuple(part for part in asked.parts.split(",") if part != "merge")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; there are: {', '.join(PARTS)}, merge")
    asked.device = "host-0" if asked.device == "cpu" else asked.device
    asked.model = asked.model or ("tiny" if is_host(asked.device) else "random:8b")
    asked.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started ends too
    words = " ".join(["python -m bench.engine_gpu.measure", *argv])
    about = about_run(words, machine_of(asked.device)) if parts else {}
    well = True
    for part in parts:
        try:
            well = run(part, asked) and well
        finally:
            write(asked.out, about)
    for name, row in write(asked.out, about).items():
        shown = {key: value for key, value in row.items() if key != "each"}
        print(f"{name:20} {'met' if row.get('met', True) else 'MISSED'} {json.dumps(shown)[:3000]}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
