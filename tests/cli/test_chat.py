"""`holdfast chat` against real servers, on a real terminal and through pipes: it answers, stops, and survives kills."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.chat.view import MARK, WAITING
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import fetch, free_port
from tests.rigs.cli.pseudo_terminal import COLUMNS, WAIT_S, OnTerminal
from tests.rigs.mid_stream import kill_serving, slow_down

pytestmark = [pytest.mark.alone, pytest.mark.processes]

SEED = ("--seed", "7")
ENOUGH = ("--max-tokens", "150")  # at 10 ms a token: long enough to be killed in the middle
CUT = "this answer was interrupted"
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def breakable() -> Iterator[Deployment]:
    """Two slow workers; every test leaves both of them and the frontend alive."""
    with Deployment(workers=2, sim={"ttft_ms": 5, "tpot_ms": 10}) as started:
        yield started


def piped(state_dir: Path, *words: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "holdfast", "chat", *words]
    stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if given is None else {"input": given}
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "HOLDFAST_STATE_DIR": str(state_dir)}
    return subprocess.run(command, env=env, capture_output=True, timeout=WAIT_S, check=False, **stdin)


def told(deployment: Deployment, *messages: str, max_tokens: int | None = None) -> str:
    """What the server answers to this conversation when nothing goes wrong."""
    roles = ("user", "assistant")
    said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
    body = {"model": "holdfast-sim", "messages": said, "seed": 7, "max_tokens": max_tokens}
    address = f"127.0.0.1:{deployment.port}"
    answer = json.loads(fetch(address, "/v1/chat/completions", "POST", timeout_s=WAIT_S, body=body)[1])
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def unbroken(breakable: Deployment) -> str:
    """The answer that the tests below break in on."""
    return told(breakable, "tell me", max_tokens=150)


def letters(text: str) -> str:
    """Wrapping changes white space alone."""
    return "".join(text.split())


def answers(screen: list[str]) -> list[list[str]]:
    """The lines under each question, with their margins."""
    found: list[list[str]] = []
    for line in screen:
        if line.startswith("you>"):
            found.append([])
        elif found and line.startswith(("  ", f"{MARK} ")) and CUT not in line:
            found[-1].append(line)
    return found


def shown(lines: list[str]) -> str:
    return letters("".join(line[2:] for line in lines))


# -- through pipes


def test_one_question(deployment: Deployment) -> None:
    """A message on the command line is answered on stdout, exactly as the server says it, and nothing else."""
    done = piped(deployment.folder, "tell me", *SEED, "--max-tokens", "30")
    assert (done.returncode, done.stderr.decode()) == (0, "… the answer was cut off at its limit of tokens\n")
    assert done.stdout.decode() == told(deployment, "tell me", max_tokens=30) + "\n"


def test_a_piped_question(deployment: Deployment) -> None:
    """What is piped in is the question, whole; nothing piped in is refused."""
    url = f"http://127.0.0.1:{deployment.port}/v1"
    done = piped(Path("/nonexistent"), "--url", url, *SEED, "--max-tokens", "30", given="two\nlines é\n".encode())
    assert (done.returncode, done.stdout.decode()) == (0, told(deployment, "two\nlines é", max_tokens=30) + "\n")
    done = piped(deployment.folder, given=b" \n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"holdfast: standard input is empty")


def test_no_server_is_said_with_the_mend(tmp_path: Path, deployment: Deployment) -> None:
    """Nothing in the state directory, nothing at the address, no such model: one line each, status 1."""
    nobody = f"http://127.0.0.1:{free_port()}"
    for words, said in (
        (("hi",), "start one with `holdfast up`, or name another with --url"),
        (("hi", "--url", nobody), f"nothing listens at {nobody}"),
        (("hi", "--url", "gopher://x"), "is not the address of a server"),
        (("hi", "--url", f"127.0.0.1:{deployment.port}", "--model", "none"), "the server answers 404"),
    ):
        done = piped(tmp_path, *words)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.count(b"\n") == 1, done.stderr
        assert said in done.stderr.decode()


# -- on a terminal


def test_a_conversation_of_two_turns(deployment: Deployment) -> None:
    """The second question goes with the first and its answer; /new forgets both; every line has a margin."""
    first = told(deployment, "one", max_tokens=40)
    second = told(deployment, "one", first, "two", max_tokens=40)
    assert second != told(deployment, "two", max_tokens=40)
    with OnTerminal(deployment.folder, "chat", *SEED, "--max-tokens", "40") as chat:
        chat.until("you>")
        chat.type("one\n")
        chat.until("you>", 2)
        chat.type("two\n")
        chat.until("you>", 3)
        chat.type("/new\n")
        chat.until("the conversation is forgotten")
        chat.type("one\n")
        chat.until("you>", 5)
        chat.type(CTRL_D)
        assert chat.end() == 0
    got = [shown(lines) for lines in answers(chat.screen()) if lines]
    assert got == [letters(first), letters(second), letters(first)]
    assert len(answers(chat.screen())[0]) > 1
    assert all(len(line) < COLUMNS for line in chat.screen())


def test_ctrl_c_stops_an_answer(deployment: Deployment) -> None:
    """The first frees the engine and brings the prompt back, where another question is answered; the second leaves."""
    with OnTerminal(deployment.folder, "chat", *SEED, "--max-tokens", "20000") as chat:
        chat.until("you>")
        chat.type("go on for ever\n")
        deployment.wait_until(lambda: deployment.worker_facts("worker-0")["running"] == 1, "the answer to run")
        chat.until("\n  ")
        chat.type(CTRL_C)
        chat.until("stopped")
        chat.until("you>", 2)
        deployment.wait_until(lambda: deployment.worker_facts("worker-0")["running"] == 0, "the engine to be free")
        chat.type("/help\n")
        chat.until("same message again.")
        chat.until("you>", 3)
        chat.type(CTRL_C)
        assert chat.end() == 0


def both_alive(deployment: Deployment) -> None:
    deployment.wait_until(lambda: len(deployment.alive_workers()) == 2, "both workers to serve")


def test_an_engine_dies_under_the_answer(breakable: Deployment, unbroken: str) -> None:
    """SIGKILL in mid-answer: nothing to do for the person, every word as without it, one mark and one note."""
    with OnTerminal(breakable.folder, "chat", *SEED, *ENOUGH) as chat:
        chat.until("you>")
        slow_down(breakable)
        chat.type("tell me\n")
        chat.until("\n  ")
        victim = kill_serving(breakable)
        chat.until("you>", 2)
        chat.type(CTRL_D)
        assert chat.end() == 0
    breakable.start_worker(victim)
    both_alive(breakable)
    screen = chat.screen()
    (lines, _) = answers(screen)
    assert shown(lines) == letters(unbroken)
    assert [line[0] for line in lines].count(MARK) == 1
    assert lines[0][0] == " "
    assert f"{MARK} {CUT}; it continued after " in "\n".join(screen)


def test_a_piped_answer_survives_too(breakable: Deployment, unbroken: str) -> None:
    """Through a pipe stdout has the answer alone; that an engine died stands on stderr."""
    done: list[subprocess.CompletedProcess[bytes]] = []
    slow_down(breakable)
    asking = threading.Thread(target=lambda: done.append(piped(breakable.folder, "tell me", *SEED, *ENOUGH)))
    asking.start()
    victim = kill_serving(breakable)
    asking.join(WAIT_S)
    breakable.start_worker(victim)
    both_alive(breakable)
    assert done[0].stdout.decode() == unbroken + "\n"
    assert f"{MARK} {CUT}" in done[0].stderr.decode()


@pytest.mark.long
def test_no_engine_is_up_for_a_while(breakable: Deployment, unbroken: str) -> None:
    """With every engine dead, before or in the middle of an answer, it says so and goes on when one is back."""
    with OnTerminal(breakable.folder, "chat", *SEED, *ENOUGH) as chat:
        chat.until("you>")
        slow_down(breakable)
        chat.type("tell me\n")
        chat.until("\n  ")
        for name in breakable.worker_names:
            breakable.kill(name)
        chat.until(WAITING)
        breakable.start_worker("worker-0")
        chat.until("you>", 2)
        breakable.kill("worker-0")
        chat.type("and now?\n")
        chat.until(WAITING)
        breakable.start_worker("worker-0")
        breakable.start_worker("worker-1")
        chat.until("you>", 3)
        chat.type(CTRL_D)
        assert chat.end() == 0
    both_alive(breakable)
    screen = chat.screen()
    assert WAITING not in "\n".join(screen)
    assert shown(answers(screen)[0]) == letters(unbroken)
    assert shown(answers(screen)[1]) == letters(told(breakable, "tell me", unbroken, "and now?", max_tokens=150))


def test_the_frontend_dies_under_the_answer(breakable: Deployment, unbroken: str) -> None:
    """One line says so; Enter alone sends the message again, to a frontend that may still be on its way up."""
    with OnTerminal(breakable.folder, "chat", *SEED, *ENOUGH) as chat:
        chat.until("you>")
        slow_down(breakable)
        chat.type("tell me\n")
        chat.until("\n  ")
        breakable.kill("frontend")
        for name in breakable.worker_names:
            breakable.chaos(name, "clear")
        chat.until("press Enter to send your message again")
        chat.until("you>", 2)
        chat.type("\n")
        breakable.start_frontend()
        chat.until("you>", 3)
        for prompts in range(4, 14):  # a frontend that has only just started may know no worker yet, and says so
            if shown(answers(chat.screen())[-2]):
                break
            chat.type("\n")
            chat.until("you>", prompts)
        chat.type(CTRL_D)
        assert chat.end() == 0
    both_alive(breakable)
    screen = chat.screen()
    assert "! the server went away in the middle of the answer; press Enter to" in "\n".join(screen)
    assert letters(unbroken).startswith(shown(answers(screen)[0]))
    assert shown(answers(screen)[-2]) == letters(unbroken)
