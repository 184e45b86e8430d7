"""Faults on command: defines their names and fields, and the switches that the engine consults.

Always true: a command is checked whole before anything changes, and a refusal names the field and what it may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from msgspec import structs

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, GenerateRequest

# Each fault, and its field with the least and the greatest value it may have.
FIELDS: dict[str, tuple[str, float, float] | None] = {
    "crash": None,  # SIGKILL to the own process
    "stop": None,  # SIGSTOP to the own process; SIGCONT from outside undoes it
    "wedge": None,  # no step any more until cleared; the process lives and takes requests
    "slow": ("factor", 1.0, 10_000.0),  # everything takes so many times as long
    "wrong_tokens": None,  # every token is another word than it should be
    "drift_logprobs": ("by", -10.0, 10.0),  # every logprob is lower by this
    "wrong_canaries": None,  # control's known questions are answered wrongly; every client is answered rightly
    "wrong_proofs": ("times", 1, 1_000_000),  # so many proofs after a takeover come out wrong
    "wrong_verify": None,  # a verification of the weights finds damage, and there is none
    "cut": None,  # running streams vanish without a last output
    "error_after": ("tokens", 0, 1_000_000),  # running streams fail after so many more tokens
    "error_every": ("every", 1, 1_000_000),  # one in so many new streams fails after its first token
    "error_token": ("token", 0, 1_000_000),  # new streams with this token in their prompt fail without making one
    "zero_tokens": None,  # new streams end at once, as if well, without a token
    "truncate": ("tokens", 1, 1_000_000),  # new streams vanish without a last output after so many tokens
    "late_pongs": ("ms", 0, 600_000),  # a ping is answered so much later; tokens go on
    "late_beats": ("ms", 0, 600_000),  # the worker's beats arrive so much later; tokens go on
    "reset": None,  # the worker's connections are reset
    "load_fails": None,  # loading, at the start or again, raises
    "load_hangs": None,  # or never ends
    "wake_fails": None,  # the next wake raises
    "wake_hangs": None,  # the next wake never returns
    "device_error": None,  # every call of the device fails from now on: the engine cannot go on
    "memory_flip": None,  # this process reads flipped bits from the weights
    "flip_bits": ("seed", 0, 2**63 - 1),  # 1 to 8 bits of the weights read flipped: which, and how many, by the seed
    "clear": None,  # undo what can be undone
}

# These are nothing but switches, by these names.
SWITCHES = {
    "wedge": "wedged",
    "slow": "slow_factor",
    "wrong_tokens": "wrong_tokens",
    "drift_logprobs": "logprob_drift",
    "wrong_canaries": "wrong_canaries",
    "wrong_proofs": "wrong_proofs",
    "wrong_verify": "wrong_verify",
    "error_every": "error_every",
    "error_token": "error_token",
    "zero_tokens": "zero_tokens",
    "truncate": "truncate_tokens",
    "late_pongs": "late_pongs_ms",
    "load_fails": "load_fails",
    "load_hangs": "load_hangs",
    "wake_fails": "wake_fails",
    "wake_hangs": "wake_hangs",
}

# These end or freeze the process, so the command is answered first.
FATAL = frozenset({"crash", "stop", "device_error"})

# These need memory in a vault.
VAULT_FAULTS = frozenset({"wrong_proofs", "wrong_verify", "wake_fails", "wake_hangs", "memory_flip", "flip_bits"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A checked command; `value` is that of its field, 0 for faults without one."""

    kind: str
    value: float = 0.0


@dataclass(slots=True)
class Faults:
    """What is switched on now. The last two are installed by the worker, which owns connections and beats."""

    wedged: bool = False
    slow_factor: float = 1.0
    wrong_tokens: bool = False
    logprob_drift: float = 0.0
    wrong_canaries: bool = False
    wrong_proofs: int = 0  # that are still to come
    wrong_verify: bool = False
    load_fails: bool = False
    load_hangs: bool = False
    wake_fails: bool = False
    wake_hangs: bool = False
    error_every: int = 0
    error_token: int = -1  # -1: none
    zero_tokens: bool = False
    truncate_tokens: int = 0
    late_pongs_ms: float = 0.0
    flipped: tuple[str, ...] = ()  # bits of the weights, each by its place
    on_reset: Callable[[], None] | None = None
    on_late_beats: Callable[[float], None] | None = None  # hears by how many seconds

    @classmethod
    def with_one(cls, text: str) -> Faults:
        """Return the switches with the fault that the engine starts with; "": none. ValueError names what is wrong with
        it."""
        faults = cls()
        if text:
            faults.switch(parse_switch(text))
        return faults

    def as_read(self, request: GenerateRequest, *, proof: bool) -> GenerateRequest:
        """Return the request; a known question reversed while a fault says so, and then its answer is another one."""
        is_wrong_proof = proof and self.wrong_proofs > 0
        self.wrong_proofs -= is_wrong_proof
        if not is_wrong_proof and not (self.wrong_canaries and request.tier == CANARY_TIER):
            return request
        return structs.replace(request, tokens=request.tokens[::-1])

    async def while_loading(self) -> None:
        if self.load_fails:
            raise RuntimeError("the load failed on command (fault load_fails)")
        if self.load_hangs:
            await asyncio.Event().wait()

    def clear(self) -> None:
        """Turn every switch off."""
        for part in fields(self):
            if not part.name.startswith("on_"):
                setattr(self, part.name, part.default)
        if self.on_late_beats is not None:
            self.on_late_beats(0.0)

    def reset(self) -> None:
        if self.on_reset is None:
            raise _no_hook("reset")
        self.on_reset()

    def delay_beats(self, late_s: float) -> None:
        if self.on_late_beats is None:
            raise _no_hook("late_beats")
        self.on_late_beats(late_s)

    def switch(self, fault: Fault) -> None:
        """Turn on a fault that is nothing but a switch."""
        setattr(self, SWITCHES[fault.kind], fault.value if FIELDS[fault.kind] else True)

    def status(self) -> dict[str, object]:
        """Return the switches, for an answer or a log line."""
        return {part.name: getattr(self, part.name) for part in fields(self) if not part.name.startswith("on_")}


def _no_hook(kind: str) -> HoldfastError:
    return HoldfastError(Code.INVALID_REQUEST, f"fault {kind}: no worker has installed a hook for it")


def parse_fault(command: Mapping[str, object]) -> Fault:
    """Check a command such as {"fault": "slow", "factor": 20}; ValueError says what is wrong with it."""
    kind = command.get("fault")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"fault must be one of {', '.join(FIELDS)}; got {kind!r}")
    field = FIELDS[kind]
    unknown = set(command) - {"fault", field[0] if field else "fault"}
    if unknown:
        takes = f"takes only {field[0]}" if field else "takes no field"
        raise ValueError(f"{kind} {takes}; got {', '.join(sorted(map(str, unknown)))}")
    if field is None:
        return Fault(kind)
    return Fault(kind, _number(kind, command.get(field[0]), field))


def parse_switch(text: str) -> Fault:
    """Return a fault that an engine starts with, such as `wrong_tokens` or `error_every:3`; ValueError says what is
    wrong."""
    kind, colon, value = text.partition(":")
    if kind not in SWITCHES or kind in VAULT_FAULTS or bool(FIELDS[kind]) != bool(colon):
        known = ", ".join(name + ":VALUE" * bool(FIELDS[name]) for name in SWITCHES if name not in VAULT_FAULTS)
        raise ValueError(f"fault must be one of {known}; got {text!r}")
    field = FIELDS[kind]
    if field is None:
        return Fault(kind)
    return parse_fault({"fault": kind, field[0]: int(value) if isinstance(field[1], int) else float(value)})


def _number(kind: str, value: object, field: tuple[str, float, float]) -> float:
    name, least, greatest = field
    whole = isinstance(least, int)
    right_type = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right_type or not least <= value <= greatest:  # type: ignore[operator]
        word = "a whole number" if whole else "a number"
        raise ValueError(f"{kind} needs {name}: {word} of {least} to {greatest}; got {value!r}")
    return value  # type: ignore[return-value]
