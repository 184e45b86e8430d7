"""Frontends replaced under clients that keep their connections, with real processes: nobody's connection is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from openai import OpenAI

from holdfast.testing.rig import WAIT_S
from tests.rigs.roles.kept_manifest import Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(300)]
MANIFEST = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: door}
spec:
  services:
    Frontend:
      componentType: frontend
      replicas: 2
      extraPodSpec: {mainContainer: {image: "holdfast:1.0"}}
    Worker:
      componentType: worker
      modelName: holdfast-sim
      extraPodSpec: {mainContainer: {args: [--engine, sim, --sim-tpot-ms, "10"]}}
"""
BUSY, RESTING = 8, 8
TOKENS = 60  # 0.6 s: some begin before their frontend leaves, and end after
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


class Customer:
    """The official client, which keeps its connection and tries nothing twice."""

    def __init__(self, port: int, number: int) -> None:
        self._client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60.0)
        self._streams = number % 2 == 0
        self._words = f"story {number}"
        self.answers: list[str] = []
        self.trouble: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def ask(self) -> None:
        how = {"model": "holdfast-sim", "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        messages = [{"role": "user", "content": self._words}]
        ask = self._client.chat.completions.create
        try:
            if self._streams:
                pieces = list(ask(messages=messages, stream=True, **how))  # type: ignore[call-overload]
                text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
            else:
                text = ask(messages=messages, **how).choices[0].message.content or ""  # type: ignore[call-overload]
        except Exception as error:
            self.trouble.append(f"{type(error).__name__}: {error} {error.__cause__}")
        else:
            self.answers.append(text)

    def _ask_on(self) -> None:
        while not self._over.is_set():
            self.ask()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """It asks all the time."""
        self._thread.start()
        yield
        self._over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "an answer that did not end"


def rested(port: int) -> socket.socket:
    """A connection that was answered once, and not told that this was all."""
    sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
    sock.sendall(MODELS)
    head, _, _ = sock.recv(65536).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"connection: close" not in head.lower()
    return sock


async def test_frontends_are_replaced_without_a_dropped_connection() -> None:
    """Clients that ask all the time, on connections that they keep, are answered alike; those that rest meanwhile see
    an end before they ask, never a reset, and ask again as if nothing had been."""
    with Kept() as site, contextlib.ExitStack() as kept:
        async with site.kept(MANIFEST) as rolling:
            await site.in_place(rolling, 1)
            customers = [Customer(site.port, number) for number in range(BUSY)]
            seldom = [Customer(site.port, number) for number in range(RESTING)]
            await in_threads(*(one.ask for one in seldom))
            resting = [kept.enter_context(rested(site.port)) for _ in range(RESTING)]
            async with asyncio.timeout(250.0):
                with contextlib.ExitStack() as all_the_time:
                    for one in customers:
                        all_the_time.enter_context(one.busy())
                    old = frontends(site)
                    await site.apply(rolling, MANIFEST.replace(":1.0", ":2.0"))
                    await site.in_place(rolling, 2)
                    assert (len(old), len(frontends(site)), old & frontends(site)) == (2, 2, set())
                await in_threads(*(one.ask for one in seldom))
                assert await in_threads(*(lambda s=sock: s.recv(1) for sock in resting)) == [b""] * RESTING
            everybody = [*customers, *seldom]
            assert [one.trouble for one in everybody] == [[]] * len(everybody), site.told
            assert [len(set(one.answers)) for one in everybody] == [1] * len(everybody)


def frontends(site: Kept) -> set[int]:
    return {slot.life.pid for slot in site.supervisor.slots.values() if slot.job.role == "frontend"}


async def in_threads(*works: Callable[[], object]) -> list[object]:
    return await asyncio.gather(*map(asyncio.to_thread, works))
