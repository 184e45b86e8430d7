"""`make prove-data-path`: every promise of the data path, at full size, with its bound."""

from __future__ import annotations

from functools import partial
from itertools import product

from bench import frontend
from bench.data_path import faults, latency
from bench.data_path.faults import HITS, STALL_MS_MAX, run_calm, run_case, run_stop_and_continue
from bench.prove import Row, Rows
from holdfast.testing.workload import Workload


def _stop_and_continue() -> Row:
    outcome, verdicts = run_stop_and_continue(Workload(tokens=900), continue_after_s=10.0)
    met = outcome.survived and outcome.stall_ms <= STALL_MS_MAX["stop"] and verdicts[-2:] == ["probation", "alive"]
    bound = f"all survive, stall <= {STALL_MS_MAX['stop']} ms, the worker returns on probation"
    return outcome.as_dict() | {"verdicts": verdicts, "bound": bound, "met": met}


def _matrix(fault: str) -> Row:
    outcome = run_case(fault)
    met = outcome.survived and outcome.stall_ms <= STALL_MS_MAX[fault]
    return outcome.as_dict() | {"bound": f"all survive, stall <= {STALL_MS_MAX[fault]} ms", "met": met}


def _no_false_alarm() -> Row:
    row = run_calm(60.0, streams=64)
    return row | {"bound": "nothing lost or moved", "met": row["streams_lost"] == row["resumed"] == 0}


def _only_worker() -> Row:
    row = faults.only_worker_returns(5.0, Workload())
    return row | {"bound": "all finish, exact", "met": row["survived"]}


def _no_worker() -> Row:
    row = faults.no_worker_within_hold(30.0, Workload())
    met = row["late_status"] == 503 and row["late_retry_after"] and not row["false_done"]
    met = met and row["ended_with_error_event"] == row["streams"] and row["frontend_alive"]
    return row | {"bound": "503 with Retry-After; open streams end with an error event, none with [DONE]", "met": met}


def _frontend_killed() -> Row:
    row = faults.frontend_killed()
    met = row["orphans_cancelled_ms"] <= 1000 and row["restart_to_ready_s"] <= 1.0
    return row | {"bound": "orphans cancelled, ready again within 1 s", "met": met}


def _store(kind: str, how: str) -> Row:
    row = faults.store_outage(kind, how, 20.0, streams=64)
    met = not row["broken"] and row["workers_after"] == 2 and not row["resumed"]
    return row | {"bound": "no stream broken or moved, no worker forgotten, watches resume", "met": met}


def _cost(streams: int, pace_ms: float, bound: float) -> Row:
    row = frontend.run(frontend.FrontendBench(streams, pace_ms))
    return row | {"bound": f"cpu_ms_per_1k_tokens <= {bound}", "met": row["cpu_ms_per_1k_tokens"] <= bound}


def _first_token() -> Row:
    row = latency.first_token()
    return row | {"bound": "ttft_added_ms_p50 <= 1.5", "met": row["ttft_added_ms_p50"] <= 1.5}


def _long_prompt() -> Row:
    row = latency.long_prompt()
    return row | {"bound": "delay_ms <= 20", "met": row["delay_ms"] <= 20}


ROWS: Rows = {
    **{f"fault-{fault}": partial(_matrix, fault) for fault in HITS if fault != "stop"},
    "fault-stop": _stop_and_continue,
    "no-false-alarm": _no_false_alarm,
    "only-worker-returns": _only_worker,
    "no-worker-within-hold": _no_worker,
    "frontend-killed": _frontend_killed,
    **{f"store-{'-'.join(case)}": partial(_store, *case) for case in product(("embedded", "etcd"), ("kill", "freeze"))},
    "cost-full-speed": partial(_cost, 32, 0.0, 12.0),
    "cost-paced": partial(_cost, 64, 10.0, 32.0),
    "first-token": _first_token,
    "long-prompt": _long_prompt,
}
FIGURES = ("stall_ms", "finished", "resumed", "cpu_ms_per_1k_tokens", "ttft_added_ms_p50", "delay_ms", "broken")
