"""What whoever starts an engine is told when vLLM cannot make one."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from holdfast.core.errors import Refused, UserError
from holdfast.engines.vllm.engine import vllm_errors
from holdfast.memory.devices.contract import DeviceError


def test_whatever_vllm_raises_is_a_sentence() -> None:
    """Its libraries have errors of their own, some without words."""

    class OwnError(Exception):
        pass

    with pytest.raises(DeviceError, match=r"^vLLM cannot make its engine: a header is damaged$"), vllm_errors():
        raise OwnError("a header\n  is damaged")
    with pytest.raises(DeviceError, match=r"^vLLM cannot make its engine: AssertionError$"), vllm_errors():
        raise AssertionError


@pytest.mark.parametrize("ours", [UserError("x"), Refused("x"), TimeoutError("x"), DeviceError("x")])
def test_our_own_errors_stay_what_they_are(ours: Exception) -> None:
    """A refusal is not tried again, and a lost vault is."""
    with pytest.raises(type(ours), match=r"^x$"), vllm_errors():
        raise ours


@pytest.mark.parametrize("available", [0, 1 << 20])
def test_a_pool_that_holds_no_text_of_the_context_is_refused(available: int) -> None:
    """vLLM's own words, as this version has them, name options that are not to be set here."""
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    with pytest.raises(Refused, match="--kv-gib") as told, vllm_errors():
        _check_enough_kv_cache_memory(available, lambda: 1 << 30, 4096, lambda _: 480)
    assert "gpu_memory_utilization" not in str(told.value)
    assert ("480" in str(told.value)) == bool(available)
