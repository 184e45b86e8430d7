"""torch tensors over memory that torch did not allocate: at an address, on host or GPU, without a copy.

Always true: only `copy_bytes` copies; a storage keeps its owner alive as long as a tensor uses it; the vault keeps a
tensor's whole span (`span_bytes`), including the gaps of its strides.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.memory.devices.contract import DeviceError, Unsupported
from holdfast.spec.names import is_host

# Bytes per copy: some 50 ms at host memory speed, so that the event loop is not blocked for longer.
_PIECE_BYTES = 256 * 1024 * 1024
_WORD_BYTES = 8


class _CudaBytes:
    """GPU memory in torch's import interface. As bytes: the interface supports neither bf16 nor fp8."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        # torch does not support read-only memory: a write causes a GPU fault.
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def torch_device(name: str) -> torch.device:
    """Return the torch device for a device name."""
    if is_host(name):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    for number in range(count):
        if str(torch.cuda.get_device_properties(number).uuid).lower() in name.lower():
            return torch.device("cuda", number)
    if count == 1:  # a MIG slice is the only visible device, and torch does not show its id
        return torch.device("cuda", 0)
    raise Unsupported(f"torch does not see {name}", "install a build of torch for this GPU; see CUDA_VISIBLE_DEVICES")


def storage_at(address: int, size: int, device: torch.device, owner: object) -> torch.UntypedStorage:
    """Return a storage of `size` > 0 mapped bytes at an address."""
    flat: torch.Tensor
    if device.type == "cpu":
        buffer: Any = (ctypes.c_ubyte * size).from_address(address)
        buffer.owner = owner
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
    else:
        flat = torch.as_tensor(_CudaBytes(address, size, owner), device=device)
    if flat.data_ptr() != address:
        raise DeviceError(f"torch copied {address:#x}+{size} to {device} instead of using it")
    return flat.untyped_storage()


def tensor_in(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor that starts `offset` bytes into a storage."""
    whole, rest = divmod(offset, dtype.itemsize)
    assert rest == 0, "a tensor starts at a multiple of its element's size"
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, whole, shape, stride)


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last element; 0 if it is empty."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's span as flat bytes, without a copy."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor_in(tensor.untyped_storage(), torch.uint8, start, (span_bytes(tensor),), (1,))


async def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat bytes in pieces, also between devices. Other tasks run in between."""
    for at in range(0, source.numel(), _PIECE_BYTES):
        target[at : at + _PIECE_BYTES].copy_(source[at : at + _PIECE_BYTES])
        await asyncio.sleep(0)


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 64-bit words. Smaller words would first be widened, in a copy four times as
    large."""
    flat = tensor.view(-1)
    whole = flat.numel() * flat.element_size() // _WORD_BYTES * _WORD_BYTES // flat.element_size()
    rest = flat[whole:].view(torch.int8).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest if whole else rest


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype with this name in a layout; None if this torch does not have it."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def unfit(tensor: torch.Tensor) -> str | None:
    """Return why a tensor is not plain bytes at an address, or None."""
    if is_lazy(tensor):
        return "is not initialised yet"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"has the layout {tensor.layout}"
    if tensor.is_quantized:
        return "is quantised by torch, with a scale outside its bytes"
    if is_traceable_wrapper_subclass(tensor):
        return f"is a {type(tensor).__name__}, which wraps other tensors"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that conjugates or negates"
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        return f"is on {tensor.device}"
    return None
