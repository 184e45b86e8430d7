"""`holdfast chat` talks to a server in the terminal and marks in the margin where an engine died during an answer.

Always true: a message without a complete answer is kept, and sent again when the user presses Enter. The conversation
has only answers that the user saw completed, or stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from holdfast.cli.api_keys import first_key, read_keys
from holdfast.cli.arguments import CommandOptions
from holdfast.cli.chat.server import AnswerEnd, AnswerResumed, AnswerText, AnswerWaits, ChatTrouble, Server
from holdfast.cli.chat.view import AnswerView, view_for, visible
from holdfast.cli.checks import readable
from holdfast.cli.screen import tilde
from holdfast.cli.terminal import Terminal
from holdfast.core.errors import UserError
from holdfast.roles.model_names import NOTES
from holdfast.settings import Environment
from holdfast.spec.launch import RecordedLaunch
from holdfast.spec.settings import Settings, about
from holdfast.supervise.records import read_launch
from holdfast.supervise.status import look, web_address
from holdfast.wire.net import SocketNetwork

PIPED_BYTES_MAX = 16 * 1024 * 1024  # a frontend's default limit for a request
STOPPED = 130  # exit status in shells after SIGINT
_CHAT = ("chat",)
HELP = """\
Enter sends a line; the whole conversation goes with it.
  /new    forget the conversation and start over
  /help   this
Ctrl-C stops an answer, and leaves at the prompt; Ctrl-D leaves.
When an answer broke off, Enter on an empty line sends the same message again."""


class RequestParameters(Settings, frozen=True):
    """The parameters sent with every message; None: the server's default."""

    system: Annotated[str, about("System prompt.", commands=_CHAT)] = ""
    max_tokens: Annotated[int | None, about("Maximum answer length in tokens.", min=1, commands=_CHAT)] = None
    temperature: Annotated[
        float | None, about("Sampling temperature; 0 always takes the likeliest token.", min=0, max=2, commands=_CHAT)
    ] = None
    seed: Annotated[int | None, about("Sampling seed; the same seed gives the same answer.", commands=_CHAT)] = None


class ChatCommand(CommandOptions, frozen=True):
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
    parameters: Annotated[RequestParameters, about("Request parameters sent with every message.")] = RequestParameters()

    def run(self, env: Environment) -> int:
        return run_chat(self, env.state_dir if self.url else readable(env.state_dir))


@dataclass(slots=True)
class Conversation:
    model: str
    parameters: RequestParameters
    messages: list[dict[str, str]] = field(default_factory=list)
    unanswered: str = ""  # the last message, if it has no complete answer

    def start_over(self) -> None:
        self.messages, self.unanswered = [], ""

    def request(self) -> dict[str, Any]:
        parameters = self.parameters
        system = [{"role": "system", "content": parameters.system}] if parameters.system else []
        asked = {"role": "user", "content": self.unanswered}
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *self.messages, asked]}
        chosen = {"max_tokens": parameters.max_tokens, "temperature": parameters.temperature, "seed": parameters.seed}
        return body | {name: value for name, value in chosen.items() if value is not None}

    def add_answer(self, text: str) -> None:
        """Add the message and its answer, even one that the user stopped, because they saw it. If the answer has no
        text, drop the message."""
        if text:
            asked = {"role": "user", "content": self.unanswered}
            self.messages += [asked, {"role": "assistant", "content": text}]
        self.unanswered = ""


def run_chat(asked: ChatCommand, state_dir: Path) -> int:
    """Run `holdfast chat`. Without an API key, use the key of the deployment running here, if it has one."""
    message = asked.message
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter must not end the chat
    if not message and not sys.stdin.isatty():
        message = _piped()
    key = asked.api_key
    if asked.api_key_file is not None:
        key = first_key(read_keys(asked.api_key_file))
    server = Server.at(asked.url, key) if asked.url else _running_here(state_dir, key)
    try:
        conversation = Conversation(asked.model or server.model(), asked.parameters)
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


# -- the server to talk to


def _running_here(state_dir: Path, api_key: str) -> Server:
    """Return the frontend in this state directory, preferably one that can serve."""
    statuses = [status for status in asyncio.run(look(state_dir, SocketNetwork())) if status.role == "frontend"]
    found = [status for status in statuses if status.pid and status.state != "dead" and status.address]
    found.sort(key=lambda status: status.state != "ready")
    if not found:
        states = "".join(f"; its {status.name} is {status.state}" for status in statuses[:1])
        start = "`holdfast status` shows more" if statuses else "start one with `holdfast up`"
        raise UserError(f"no server runs in {tilde(state_dir)}{states}; {start}, or name another with --url")
    launch = RecordedLaunch.of(read_launch(state_dir, found[0].name))
    return Server.at(web_address(found[0].address), api_key or first_key(launch.api_keys))


# -- asking


def _answer(server: Server, conversation: Conversation, view: AnswerView) -> bool:
    """Send the unanswered message and show the answer. Return False if the user stopped it; raise ChatTrouble if it
    broke off."""
    parts: list[str] = []
    ended: AnswerEnd | None = None
    stopped = False
    try:
        with contextlib.closing(server.answer(conversation.request())) as events:
            for event in events:
                match event:
                    case AnswerText(text):
                        parts.append(text)
                        view.add_text(text)
                    case AnswerResumed(pause_s):
                        view.add_pause(pause_s)
                    case AnswerWaits(place):
                        view.show_waiting(place)
                    case AnswerEnd():
                        ended = event
    except KeyboardInterrupt:
        stopped = True
    finally:
        view.end(ended)
    conversation.add_answer("".join(parts))
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
    """Return the text with question marks for bytes that are not text, which could not be sent."""
    return text.encode(errors="replace").decode()
