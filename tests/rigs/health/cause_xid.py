"""A process that makes its GPU report a fault: it writes to an address that is not mapped, and dies of it.

`python cause_xid.py NUMBER`, as CUDA counts. Plain driver calls (no torch, no compiler): the kernel is a few lines of
PTX, which the driver translates. Prints what the driver said as one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p

ILLEGAL_ADDRESS = 700
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry poke()
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    mov.u64 %rd1, 0x7fdead0000;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def main(number: int) -> int:
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> int:
        return int(getattr(cuda, name)(*arguments))

    def must(name: str, *arguments: object) -> None:
        if result := call(name, *arguments):
            raise SystemExit(f"{name}: CUDA error {result}")

    device, context, module, function = c_int(), c_void_p(), c_void_p(), c_void_p()
    bus = ctypes.create_string_buffer(32)
    must("cuInit", 0)
    must("cuDeviceGet", byref(device), number)
    must("cuDeviceGetPCIBusId", bus, 32, device)
    must("cuDevicePrimaryCtxRetain", byref(context), device)
    must("cuCtxSetCurrent", context)
    must("cuModuleLoadData", byref(module), c_char_p(PTX))
    must("cuModuleGetFunction", byref(function), module, c_char_p(b"poke"))
    one, none = c_uint(1), c_uint(0)
    must("cuLaunchKernel", function, one, one, one, one, one, one, none, None, None, None)
    result = call("cuCtxSynchronize")
    print(json.dumps({"bus": bus.value.decode(), "result": result}), flush=True)
    return 0 if result == ILLEGAL_ADDRESS else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
