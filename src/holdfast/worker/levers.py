"""What operators, and control, may have a worker do: one thing at a time, and not everybody.

Always true: at most one action is under way, it ends within its bound, and whoever asked for it and leaves does not
stop it half-way. Levers stop and start serving, so they are not for whoever reaches a port: who has the token may, from
anywhere; else the kernel must say that the other end is a process of this machine, of this user or root.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from holdfast.core.errors import UserError
from holdfast.core.tasks import Tasks
from holdfast.failover.lifecycle import Misstep

log = logging.getLogger("holdfast.worker")

# Longer than a drain or a remap (30 s) by its own bound; shorter than the patience of whoever asks with curl.
ACTION_S = 60.0

Action = Callable[[], Awaitable[str]]  # answers with a sentence; refuses with a UserError
Actions = dict[str, Action]  # by the last word of their path; looked into when asked, so levers may come and go


class Answer(Protocol):
    """Who hears what came of an action, once: an HTTP status, "ok" or "error", and a sentence."""

    def give(self, status: int, word: str, message: str) -> None: ...


class Levers:
    """Runs actions, one at a time."""

    def __init__(self, action_s: float = ACTION_S) -> None:
        self._action_s = action_s
        self._tasks = Tasks("levers")  # one at a time
        self._under_way = ""

    def pull(self, name: str, action: Action, answer: Answer) -> None:
        """Begin an action, unless another is under way."""
        if len(self._tasks):
            answer.give(409, "error", f"{self._under_way} is still under way")
            return
        self._under_way = name
        self._tasks.spawn(self._run(name, action, answer), name)

    async def close(self) -> None:
        """End the action under way, if there is one."""
        await self._tasks.stop()

    async def _run(self, name: str, action: Action, answer: Answer) -> None:
        """The root of an action's task."""
        log.info("%s: asked for", name)
        try:
            async with asyncio.timeout(self._action_s) as bound:
                message = await action()
            answer.give(200, "ok", message)
        except (UserError, Misstep) as refusal:
            log.info("%s: refused: %s", name, refusal)
            answer.give(409, "error", str(refusal))
        except Exception as error:
            if bound.expired():
                log.warning("%s: given up after %g s", name, self._action_s)
                answer.give(504, "error", f"given up after {self._action_s:g} s")
                return
            log.exception("%s failed", name)
            answer.give(500, "error", f"failed: {error!r}")
        except asyncio.CancelledError:
            answer.give(503, "error", "the worker stops")
            raise


def refusal(given: bytes | None, uid: int | None, token: str, *, web_page: bool = False) -> str:
    """Why somebody may not pull a lever, in words that say how it might; "": it may. `given`: the token it showed, if
    any; `uid`: whose process of this machine it is, if that can be told."""
    if token and given is not None and hmac.compare_digest(given, token.encode()):
        return ""
    mend = "send `Authorization: Bearer` with its HOLDFAST_ENGINE_TOKEN" if token else "set HOLDFAST_ENGINE_TOKEN"
    if given is not None:
        return f"the token is wrong; {mend}"
    if web_page:
        return f"a web page may not do this; {mend}"
    if uid is None or uid not in (os.getuid(), 0):
        who = "whoever asks from another machine" if uid is None else f"uid {uid}"
        return f"{who} may not do this, only uid {os.getuid()} and root on this machine; or {mend}"
    return ""
