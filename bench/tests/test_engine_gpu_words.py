"""The pure parts of the engine's benches on a GPU: how gaps, speeds, answers and memory are counted and judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine_gpu import chain
from bench.engine_gpu import measure as engine_gpu
from bench.engine_gpu.chain import worst_gap_s
from bench.engine_gpu.words import (
    IDS,
    LLAMA_8B,
    Keep,
    Kill,
    Row,
    chain_row,
    common,
    decode_rate,
    medians,
    prompt_ids,
    speed_ratio,
    takeover_marks,
)
from holdfast.testing.answers import Answer
from tests.rigs.gpu.smi import read_apps, read_used

KILL = Kill(40.0, 20.0, {"lock": 1.0, "first_token": 30.0}, 15, 2, standby_again_s=9.0, freed_mib=700, standby_mib=690)
RIGHT = Answer(tokens=list(range(100)), done=True)
WHOLE = replace(RIGHT, resumed=1)


# -- prompts


def test_no_two_prompts_share_a_block() -> None:
    """Whatever stream and run they are of, their first ids differ, so no run finds another's blocks."""
    firsts = {tuple(prompt_ids(number, 16, run)[:2]) for number in range(64) for run in range(40)}
    assert len(firsts) == 64 * 40
    assert [len(prompt_ids(3, length)) for length in (1, 2, 3, 2000)] == [1, 2, 3, 2000]
    assert all(1000 <= token < 1000 + IDS for token in prompt_ids(63, 2000, 39))


# -- speed


def test_what_both_runs_have_in_common_does_not_count() -> None:
    """Two seconds of prompts are in both runs: the rate is that of the tokens one has more."""
    assert decode_rate(64, 2.0 + 0.32, 2.0 + 2.88) == {"decode_tps": 6400.0, "step_ms": 10.0}


def test_a_longer_run_that_was_quicker_says_nothing() -> None:
    """Noise larger than what is measured gives no figure instead of a wonderful one."""
    assert decode_rate(1, 2.0, 1.9)["decode_tps"] is None


def test_the_ratio_needs_both() -> None:
    """Only cases that both engines finished are compared, and the worst of them is the figure."""
    ours = {"a": {"decode_tps": 80.0}, "b": {"decode_tps": 65.0}, "c": {"decode_tps": None}}
    theirs = {"a": {"decode_tps": 100.0}, "b": {"decode_tps": 100.0}, "c": {"decode_tps": 100.0}}
    found = speed_ratio(ours, theirs)
    assert (found["ratio"], found["ratio_min"], found["met"]) == ({"a": 0.8, "b": 0.65}, 0.65, False)
    assert speed_ratio(ours, {}) == {}


def test_vllm_is_given_our_shape() -> None:
    """The configuration vLLM loads describes the very model that `random:8b` is."""
    pytest.importorskip("torch")
    from holdfast.engines.torch.files.config import from_hugging_face
    from holdfast.engines.torch.files.resolve import SHAPES

    ours, theirs = SHAPES["8b"], from_hugging_face(LLAMA_8B)
    assert replace(theirs, eos_token_ids=(), bos_token_id=None) == replace(ours, eos_token_ids=(), bos_token_id=None)


# -- the chain


def test_marks_count_from_the_kill() -> None:
    """The engine's timeline begins with the dead leader's last token; the kill came 4 ms later."""
    told = {"zero_monotonic_s": 100.0, "died_ms": 0.0, "lock_ms": 4.5, "first_token_ms": 30.0, "epoch": 7, "blocks": 9}
    assert takeover_marks(told | {"woken_ms": 9.0}, 100.004) == {"lock": 0.5, "woken": 5.0, "first_token": 26.0}
    assert takeover_marks({}, 100.0) == {}


def test_medians_are_in_order_of_time() -> None:
    """A mark that some takeovers lack is the median of the others."""
    found = medians([{"lock": 1.0, "first": 9.0}, {"first": 11.0, "lock": 3.0}, {"fence": 5.0}])
    assert list(found.items()) == [("lock", 2.0), ("fence", 5.0), ("first", 10.0)]


def test_a_good_chain_is_met() -> None:
    """All bounds kept: the row says so, with the figures they are judged by."""
    row = chain_row([KILL, replace(KILL, gap_ms=60.0)], [(RIGHT, WHOLE), (RIGHT, RIGHT)], 2)
    assert row["met"]
    assert not row["aim_met"]  # 60 ms is over the aim
    assert (row["gap_ms_p50"], row["gap_ms_max"], row["recomputed_tokens_max"]) == (50.0, 60.0, 15)
    assert (row["resumed_identical_share"], row["standby_mib_p50"]) == (1.0, 690)


@pytest.mark.parametrize(
    ("kill", "answer", "asked"),
    [
        (replace(KILL, gap_ms=150.1), WHOLE, 1),
        (replace(KILL, recomputed_tokens=17), WHOLE, 1),
        (KILL, replace(WHOLE, done=False), 1),
        (KILL, replace(WHOLE, tokens=list(range(101))), 1),
        (KILL, replace(WHOLE, tokens=list(range(99))), 1),
        (KILL, RIGHT, 1),
        (KILL, WHOLE, 2),
    ],
    ids=["slow", "recomputed", "lost", "repeated", "short", "nothing resumed", "too few kills"],
)
def test_a_chain_that_misses_a_bound_says_so(kill: Kill, answer: Answer, asked: int) -> None:
    """Each bound alone is enough to miss."""
    assert not chain_row([kill], [(RIGHT, answer)], asked)["met"]


def test_other_tokens_are_reported_and_allowed() -> None:
    """Under fast arithmetic a resumed stream may say something else; how much of it was the same is told."""
    row = chain_row([KILL], [(RIGHT, WHOLE), (RIGHT, replace(WHOLE, tokens=[*range(70), *[0] * 30]))], 1)
    assert row["met"]
    assert (row["resumed_identical_share"], row["resumed_same_tokens_p50"]) == (0.5, 85.0)


def test_no_kills_yet_is_a_row_too() -> None:
    """What is written down before the first kill has no figures, and is not met."""
    row = chain_row([], [], 1)
    assert (row["gap_ms_max"], row["recomputed_tokens_max"], row["met"]) == (None, None, False)


def test_common_tokens() -> None:
    """Counted until the first other one, or the shorter one's end."""
    assert [common([1, 2, 3], other) for other in ([1, 2, 3, 4], [1, 9, 3], [], [1, 2])] == [3, 1, 0, 2]


# -- clients


def test_a_gap_is_between_two_pieces_with_tokens() -> None:
    """Comments and empty chunks are no tokens; a gap open at the kill counts whole, and none that ended before it."""
    token, empty = b'{"token_ids":[5]}', b'{"token_ids":[]}'
    pieces = [(0.0, token), (9.0, token), (9.1, token), (9.2, b": waiting"), (9.3, empty), (9.6, token), (9.7, token)]
    assert worst_gap_s(pieces, 9.15) == pytest.approx(0.5)
    assert worst_gap_s(pieces[:1], 9.15) == 0.0


def test_a_kill_waits_for_streams_in_their_middle() -> None:
    """All streams must have begun, and none may be near its end."""
    begun, near_end = chain.SEEN, 1000 - chain.LEFT
    assert chain.in_their_middle([begun, near_end], 1000)
    assert not chain.in_their_middle([begun, begun - 1], 1000)
    assert not chain.in_their_middle([begun, near_end + 1], 1000)


# -- memory


def test_what_nvidia_smi_says() -> None:
    """Sizes by process where they are shown; nothing is made up where they are not."""
    assert read_apps("123, 540\n124, [N/A]\n\nNo devices were found\n77, 16896") == {123: 540, 77: 16896}
    assert (read_used("60123\n"), read_used(""), read_used("[N/A]")) == (60123, None, None)


# -- putting parts together


def test_parts_are_put_together(tmp_path: Path) -> None:
    """A part measured earlier stays; a newer one takes its row's place; the ratio is there once both halves are."""
    case = "batch-1-prompt-128"
    (tmp_path / "speed.json").write_text(json.dumps({"speed": {"cases": {case: {"decode_tps": 90.0}}}}))
    assert "decode-against-vllm" not in engine_gpu.write(tmp_path, {"date": "one"})
    (tmp_path / "speed.json").unlink()
    (tmp_path / "vllm.json").write_text(json.dumps({"vllm": {"cases": {case: {"decode_tps": 100.0}}}}))
    rows = engine_gpu.write(tmp_path, {})
    assert rows["decode-against-vllm"]["ratio"] == {case: 0.9}
    assert '"date": "one"' in (tmp_path / engine_gpu.RESULTS).read_text()


def test_a_part_that_failed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is in its file beside what it had found, what an earlier try found is not, and the command fails."""

    def fails(bench: object, keep: Keep) -> Row:
        keep({"streams": 4})
        raise TimeoutError("no standby was ready")

    (tmp_path / "chain.json").write_text(json.dumps({"chain": {"kills": 10}}))
    monkeypatch.setattr(chain, "run", fails)
    assert engine_gpu.main(["--out", str(tmp_path), "--parts", "chain", "--device", "host-0"]) == 1
    found = json.loads((tmp_path / engine_gpu.RESULTS).read_text())["rows"]["chain"]
    assert found == {"streams": 4, "failed": "no standby was ready", "met": False, "bound": "it runs"}
