"""The scenarios, as data: what changes, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

from bench import ROOT
from bench.rollouts.scenario import Scenario
from bench.rollouts.shapes import PLAIN, Shape

_TEMPLATES = ROOT / "bench" / "rollouts" / "templates"
_TERSE = ("--chat-template", str(_TEMPLATES / "terse.jinja"))
_BROKEN = ("--chat-template", str(_TEMPLATES / "broken.jinja"))

SIM = PLAIN
TWO_FRONTENDS = Shape(frontends=2)
SPLIT = Shape(split=True, envs=(("KV_CONNECTOR", "first"),))
TINY = Shape(
    workers=1,
    model="tiny",
    engine=("--engine", "torch", "--model", "tiny", "--exact", "--kv-gib", "0.05", "--torch-threads", "1"),
    failover=True,
    deadline_s=180,
)
TORCH_STREAMS = 8
# Long against the start of a worker that is well, on a busy machine; the rest of a bad update's time goes by itself.
SOON_S = 30

GOOD = (
    Scenario("worker-version", replace(SIM, image="holdfast:2.0")),
    Scenario("frontend-version", replace(TWO_FRONTENDS, frontend_image="holdfast:2.0"), TWO_FRONTENDS),
    Scenario("model-revision", replace(SIM, args=("--sim-revision", "2"))),
    Scenario("quantisation", replace(SIM, args=("--sim-quantization", "int8"))),
    Scenario("context-length", replace(SIM, args=("--sim-context-tokens-max", "16384"))),
    Scenario("tokenizer", replace(SIM, args=("--sim-tokenizer", "2"))),
    Scenario("chat-template", replace(SIM, args=_TERSE)),
    Scenario("kv-connector", replace(SPLIT, envs=(("KV_CONNECTOR", "second"),)), SPLIT),
    Scenario("served-name", replace(SIM, model="holdfast-sim-2")),
    Scenario("replicas", replace(SIM, workers=3)),
    Scenario("env", replace(SIM, envs=(("STAGE", "blue"),))),
    Scenario("failover", replace(SIM, failover=True)),
    Scenario("torch-worker-version", replace(TINY, image="holdfast:2.0"), TINY, streams=TORCH_STREAMS),
    Scenario("torch-context-length", replace(TINY, args=("--context", "2048")), TINY, streams=TORCH_STREAMS),
    Scenario("torch-chat-template", replace(TINY, args=_TERSE), TINY, streams=TORCH_STREAMS),
)

BAD = (
    Scenario("crashes", replace(SIM, args=("--sim-fault", "load_fails")), why="crashed 3 times in a row"),
    Scenario("wrong-answers", replace(SIM, args=("--sim-fault", "wrong_tokens")), why="answers wrongly"),
    Scenario("refused-card", replace(SIM, args=("--sim-context-tokens-max", "1")), why="has a card that is refused"),
    Scenario("refused-settings", replace(SIM, args=_BROKEN), why="the model's chat template does not compile"),
    Scenario(
        "never-ready",
        replace(SIM, args=("--sim-fault", "load_hangs"), deadline_s=SOON_S),
        why=f"did not come to serve within {SOON_S} s",
    ),
    Scenario(
        "error-rate", replace(SIM, args=("--sim-fault", "error_every:8")), why="to the new Worker failed", tried=True
    ),
)

SCENARIOS = {scenario.name: scenario for scenario in (*GOOD, *BAD)}
