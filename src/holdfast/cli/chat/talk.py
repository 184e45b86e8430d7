"""`holdfast chat`: talk to a server in the terminal. An engine that dies under an answer is a mark in the margin.

Always true: a message that got no whole answer is kept, and sent again when Enter is pressed; the conversation has only
what the person saw answered, or stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from holdfast.cli.api_keys import api_keys_in, read_keys
from holdfast.cli.arguments import Asked
from holdfast.cli.chat.events import ChatTrouble, Ended, Resumed, Said, Waiting
from holdfast.cli.chat.server import Server
from holdfast.cli.chat.view import View, view_for, visible
from holdfast.cli.checks import readable
from holdfast.cli.screen import tilde
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import UserError
from holdfast.core.tiers import split_key
from holdfast.roles.model_names import NOTES
from holdfast.settings import Environment
from holdfast.spec.settings import Settings, about
from holdfast.supervise.records import read_launch
from holdfast.supervise.status import look, web_address
from holdfast.wire.net import SocketNetwork

PIPED_BYTES_MAX = 16 * 1024 * 1024  # what a frontend takes as one request, by default
STOPPED = 130  # as shells have it for SIGINT
_CHAT = ("chat",)
HELP = """\
Enter sends a line; the whole conversation goes with it.
  /new    forget the conversation and start over
  /help   this
Ctrl-C stops an answer, and leaves at the prompt; Ctrl-D leaves.
When an answer broke off, Enter on an empty line sends the same message again."""


class Wishes(Settings, frozen=True):
    """What goes with every question; None: the server's choice."""

    system: Annotated[str, about("System prompt.", commands=_CHAT)] = ""
    max_tokens: Annotated[int | None, about("Maximum answer length in tokens.", min=1, commands=_CHAT)] = None
    temperature: Annotated[
        float | None, about("Sampling temperature; 0 always takes the likeliest token.", min=0, max=2, commands=_CHAT)
    ] = None
    seed: Annotated[int | None, about("Sampling seed; the same seed gives the same answer.", commands=_CHAT)] = None


class Chat(Asked, frozen=True):
    """`holdfast chat`."""

    message: Annotated[
        str, about("One message to send (default: piped input, else an interactive chat).", positional=True)
    ] = ""
    url: Annotated[str, about("Server URL, e.g. http://127.0.0.1:8000 (default: the deployment running here).")] = ""
    model: Annotated[str, about("Model to use (default: the server's first).")] = ""
    api_key: Annotated[
        str, about("API key of the server (default, without --url: that of the deployment running here).")
    ] = ""
    api_key_file: Annotated[
        Path | None, about("File with the API key (a command line is visible to other users).", commands=_CHAT)
    ] = None
    wishes: Annotated[Wishes, about("Request parameters sent with every message.")] = Wishes()

    def run(self, env: Environment) -> int:
        return run_chat(self, env.state_dir if self.url else readable(env.state_dir))


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    model: str
    wishes: Wishes
    messages: list[dict[str, str]] = field(default_factory=list)
    unanswered: str = ""  # asked last, without a whole answer

    def start_over(self) -> None:
        self.messages, self.unanswered = [], ""

    def request(self) -> dict[str, Any]:
        wishes = self.wishes
        system = [{"role": "system", "content": wishes.system}] if wishes.system else []
        asked = {"role": "user", "content": self.unanswered}
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *self.messages, asked]}
        chosen = {"max_tokens": wishes.max_tokens, "temperature": wishes.temperature, "seed": wishes.seed}
        return body | {name: value for name, value in chosen.items() if value is not None}

    def answered(self, text: str) -> None:
        """Also for an answer the person stopped: what was shown was said. Nothing shown: it was never asked."""
        if text:
            asked = {"role": "user", "content": self.unanswered}
            self.messages += [asked, {"role": "assistant", "content": text}]
        self.unanswered = ""


def run_chat(asked: Chat, state_dir: Path) -> int:
    """Without an API key that of the deployment here is used, if it was started with one."""
    message = asked.message
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter must not end the chat
    if not message and not sys.stdin.isatty():
        message = _piped()
    key = asked.api_key
    if asked.api_key_file is not None:
        key = split_key(read_keys(asked.api_key_file)[0])[0]
    server = Server.at(asked.url, key) if asked.url else _running_here(state_dir, key)
    try:
        conversation = Conversation(asked.model or server.model(), asked.wishes)
        terminal = Terminal()
        if message:
            return _ask_once(server, conversation, terminal, message)
    except ChatTrouble as trouble:
        raise UserError(visible(str(trouble))) from None
    return _converse(server, conversation, terminal)


def _piped() -> str:
    data = sys.stdin.buffer.read(PIPED_BYTES_MAX + 1)
    if len(data) > PIPED_BYTES_MAX:
        raise UserError(f"more than {PIPED_BYTES_MAX >> 20} MiB on standard input; that is more than a server accepts")
    text = data.decode(errors="replace").strip()
    if not text:
        raise UserError("standard input is empty; type a message, or run `holdfast chat` in a terminal")
    return text


# -- who is there to talk to


def _running_here(state_dir: Path, api_key: str) -> Server:
    """The frontend in this state directory, preferably one that can serve."""
    statuses = [status for status in asyncio.run(look(state_dir, SocketNetwork())) if status.role == "frontend"]
    found = [status for status in statuses if status.pid and status.state != "dead" and status.address]
    found.sort(key=lambda status: status.state != "ready")
    if not found:
        states = "".join(f"; its {status.name} is {status.state}" for status in statuses[:1])
        start = "`holdfast ps` shows more" if statuses else "start one with `holdfast up`"
        raise UserError(f"no server runs in {tilde(state_dir)}{states}; {start}, or name another with --url")
    return Server.at(web_address(found[0].address), api_key or _key_of(state_dir, found[0].name))


def _key_of(state_dir: Path, name: str) -> str:
    """Written down by `holdfast up` for this person alone."""
    keys = api_keys_in(read_launch(state_dir, name))
    return split_key(keys[0])[0] if keys else ""


# -- asking


def _answer(server: Server, conversation: Conversation, view: View) -> bool:
    """Ask what is unanswered and show what comes; False if the person stopped it. ChatTrouble if it broke off."""
    parts: list[str] = []
    ended: Ended | None = None
    stopped = False
    try:
        with contextlib.closing(server.answer(conversation.request())) as events:
            for event in events:
                match event:
                    case Said(text):
                        parts.append(text)
                        view.said(text)
                    case Resumed(pause_s):
                        view.resumed(pause_s)
                    case Waiting(place):
                        view.waiting(place)
                    case Ended():
                        ended = event
    except KeyboardInterrupt:
        stopped = True
    finally:
        view.end(ended)
    conversation.answered("".join(parts))
    return not stopped


def _ask_once(server: Server, conversation: Conversation, terminal: Terminal, message: str) -> int:
    conversation.unanswered = _sendable(message)
    return 0 if _answer(server, conversation, view_for(terminal)) else STOPPED


def _converse(server: Server, conversation: Conversation, terminal: Terminal) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - imported, it gives `input` editing and a history
    about = f"{conversation.model} at {server.url}; /help for help, Ctrl-D leaves"
    terminal.line(visible(about), style="dim")
    if note := NOTES.get(conversation.model):
        terminal.line(note, style="dim")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            _take_line(input("you> ").strip(), server, conversation, terminal)
    terminal.line()
    return 0


def _take_line(line: str, server: Server, conversation: Conversation, terminal: Terminal) -> None:
    if line == "/help":
        terminal.line(HELP, style="dim")
    elif line == "/new":
        conversation.start_over()
        terminal.line("the conversation is forgotten", style="dim")
    elif line or conversation.unanswered:
        conversation.unanswered = _sendable(line) if line else conversation.unanswered
        _ask(server, conversation, terminal)


def _ask(server: Server, conversation: Conversation, terminal: Terminal) -> None:
    try:
        whole = _answer(server, conversation, view_for(terminal))
        terminal.line("" if whole else "stopped\n", style="dim")
    except ChatTrouble as trouble:
        mend = "press Enter to send your message again" if trouble.again else "/new starts over"
        terminal.line(f"! {visible(str(trouble))}; {mend}", style="red")
        if not trouble.again:
            conversation.unanswered = ""


def _sendable(text: str) -> str:
    """Bytes of a terminal that are no text become question marks, or they could not be sent."""
    return text.encode(errors="replace").decode()
