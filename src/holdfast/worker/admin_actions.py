"""Admin actions: what operators and the control process can make a worker do, such as sleep or verify its weights.

Always true: at most one action runs at a time; it ends within its bound; it continues if its caller disconnects.
Actions stop and start serving, so a caller that can reach the port needs more: either the token, or a process on this
machine that runs, according to the kernel, as the same user or root.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable

from holdfast.core.errors import UserError
from holdfast.core.tasks import Tasks
from holdfast.failover.lifecycle import Misstep

log = logging.getLogger("holdfast.worker")

# Longer than the bound of a drain or a remap (30 s); shorter than a person waits for curl.
ACTION_S = 60.0

AdminAction = Callable[[], Awaitable[str]]  # returns a sentence; raises UserError to refuse
Actions = dict[str, AdminAction]  # by the last part of their path; looked up at each request, since they can change


# Takes the outcome of an action, once: an HTTP status, "ok" or "error", and a sentence.
ActionReply = Callable[[int, str, str], None]


class AdminActions:
    """Runs admin actions, one at a time."""

    def __init__(self, action_s: float = ACTION_S) -> None:
        self._action_s = action_s
        self._tasks = Tasks("admin actions")  # one at a time
        self._under_way = ""

    def start(self, name: str, action: AdminAction, answer: ActionReply) -> None:
        if len(self._tasks):
            answer(409, "error", f"{self._under_way} is still under way")
            return
        self._under_way = name
        self._tasks.spawn(self._run(name, action, answer), name)

    async def close(self) -> None:
        await self._tasks.stop()

    async def _run(self, name: str, action: AdminAction, answer: ActionReply) -> None:
        log.info("%s: asked for", name)
        try:
            async with asyncio.timeout(self._action_s) as bound:
                message = await action()
            answer(200, "ok", message)
        except (UserError, Misstep) as refusal:
            log.info("%s: refused: %s", name, refusal)
            answer(409, "error", str(refusal))
        except Exception as error:
            if bound.expired():
                log.warning("%s: given up after %g s", name, self._action_s)
                answer(504, "error", f"given up after {self._action_s:g} s")
                return
            log.exception("%s failed", name)
            answer(500, "error", f"failed: {error!r}")
        except asyncio.CancelledError:
            answer(503, "error", "the worker stops")
            raise


def admin_refusal(given: bytes | None, uid: int | None, token: str, *, web_page: bool = False) -> str:
    """Return why a caller may not start an action, and what would allow it; "" if it may. `given`: the caller's token,
    if it sent one; `uid`: the user of its process, if it runs on this machine."""
    if token and given is not None and hmac.compare_digest(given, token.encode()):
        return ""
    mend = "send `Authorization: Bearer` with its HOLDFAST_ENGINE_TOKEN" if token else "set HOLDFAST_ENGINE_TOKEN"
    if given is not None:
        return f"the token is wrong; {mend}"
    if web_page:
        return f"a web page may not do this; {mend}"
    if uid is None or uid not in (os.getuid(), 0):
        caller = "a caller from another machine" if uid is None else f"uid {uid}"
        return f"{caller} may not do this, only uid {os.getuid()} and root on this machine; or {mend}"
    return ""
