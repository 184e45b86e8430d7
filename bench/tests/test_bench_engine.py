"""The engine bench with the tiny model: its figures are of real work, and what is wrong is said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch engine needs torch")
pytest.importorskip("transformers", reason="what the engine is compared with")

from bench import ROOT
from bench.engine.__main__ import EngineOptions
from bench.engine.figures import prompts, row
from bench.engine.ours import OurEngine, open_model
from bench.engine.speed import EngineBench, run
from holdfast.core.errors import UserError
from holdfast.engines.torch.stepper import use_threads
from holdfast.settings import read_environment
from tests.rigs.engines.decoded import Decode
from tests.rigs.engines.transformers_model import TheirModel

pytestmark = pytest.mark.timeout(300)
TOKENS = 6


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.engine", "--model", "tiny", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_both_sides_say_the_same_words(tmp_path: Path) -> None:
    """Greedy over the same weights: our fast decode, our exact one and transformers' say the same, token for token, one
    stream alone and eight of unlike length; and each took time on the wall's clock and the CPU's."""
    use_threads(1)
    checkpoint = open_model("tiny", tmp_path, lambda text: None)
    ours, theirs = OurEngine(checkpoint, lambda text: None), TheirModel(checkpoint, "tiny", lambda text: None)
    for count in (1, 8):
        asked = prompts(count, 12, checkpoint.config.vocabulary)
        turns = [way(asked, TOKENS) for way in (ours.fast, ours.exact, theirs.decode)]
        assert turns[0].said == turns[1].said == turns[2].said
        for turn in turns:
            assert [len(said) for said in turn.said] == [TOKENS] * count
            assert turn.tokens == count * (TOKENS - 1)
            assert turn.wall_s > 0
            assert turn.cpu_s > 0


def test_prompts_are_unlike_and_the_same_again() -> None:
    """Eight prompts spread around the length asked for, one has just it, and the next call makes the same."""
    found = prompts(8, 64, 1000)
    assert [len(prompt) for prompt in found] == [32, 41, 50, 59, 69, 78, 87, 96]
    assert found == prompts(8, 64, 1000)
    assert [len(prompt) for prompt in prompts(1, 64, 1000)] == [64]


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    """A round in which the whole machine was slow does not move the ratio: each round has its own."""

    def turn(wall_s: float) -> Decode:
        return Decode([[1, 2, 3]], wall_s, wall_s)

    rounds = [
        {"fast": turn(1.0), "exact": turn(2.0), "transformers": turn(1.5)},
        {"fast": turn(10.0), "exact": turn(20.0), "transformers": turn(15.0)},
        {"fast": turn(1.0), "exact": turn(2.0), "transformers": turn(0.5)},
    ]
    found = row(1, rounds)
    assert (found["ratio"], found["ratio_min"], found["cpu_ratio"], found["exact_cost"]) == (1.5, 0.5, 1.5, 2.0)
    assert (found["fast_tokens_per_s"], found["same_text_share"]) == (2.0, 1.0)


@pytest.mark.processes
@pytest.mark.long
def test_the_command_compares_in_one_run() -> None:
    """A row for each number of streams, with all three rates; progress goes to stderr and stdout is JSON alone."""
    done = _bench("--streams", "1,3", "--tokens", "5", "--repeats", "2", "--compare", "transformers", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [found["streams"] for found in result["rows"]] == [1, 3]
    for found in result["rows"]:
        assert min(found[f"{way}_tokens_per_s"] for way in ("fast", "exact", "transformers")) > 0
        assert found["ratio_min"] <= found["ratio"]
        assert found["same_text_share"] == 1.0
    assert "round 2 of 2: transformers" in done.stderr


@pytest.mark.processes
def test_wrong_options_get_one_line() -> None:
    """What cannot be measured is refused before a model is opened, in one line that names the option."""
    for arguments, said in (
        (("--streams", "1,x"), "--streams"),
        (("--streams", "0"), "--streams"),
        (("--compare", "vllm"), "--compare"),
        (("--tokens", "1"), "--tokens"),
    ):
        done = _bench(*arguments)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert said in done.stderr


def test_without_torch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not installed by default: one line says how, where `import torch` would be a traceback."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package torch; install it: pip install"):
        EngineOptions().run(read_environment({"HOME": "/"}))


def test_without_transformers_the_mend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers is not installed, `--compare transformers` says how to have it, and nothing is measured."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(OurEngine, "__init__", lambda *_: pytest.fail("weights were loaded first"))
    with pytest.raises(UserError, match="pip install 'transformers"):
        run(EngineBench(tmp_path, "tiny", compare="transformers"), lambda text: None)
