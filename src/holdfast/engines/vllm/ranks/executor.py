"""vLLM's executor for one process, with other ranks told of every call: what EngineCore is made with where there are
several."""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from holdfast.engines.vllm.worker import rooms_here


class LeadingExecutor(UniProcExecutor):
    """Rank 0's worker is in this process. Of what makes tokens its answer is enough; else everyone's is waited for."""

    def _init_executor(self) -> None:
        leader = rooms_here().leader
        assert leader is not None, "one rank has vLLM's own"
        self._leader = leader
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._leader.meeting, 0, 0

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        assert isinstance(method, str), f"{method} cannot be told to another process"
        assert single_value or not non_block, f"{method} of all ranks is waited for"
        self._leader.tell(method, args, kwargs or {}, answered=not single_value)
        mine = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        return mine if single_value else [*mine, *self._leader.answers()]
