"""Two kernels, as PTX: `fill` writes words that tell seed and place, `check` counts the words that are wrong.

At the memory's speed, so that every byte of 120 GiB can be verified; no compiler is needed where they run.
"""

from __future__ import annotations

_HEAD = """
.visible .entry {name}(.param .u64 at, .param .u64 words, .param .u32 seed, .param .u64 wrong)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [words];
    ld.param.u32 %r1, [seed];
    ld.param.u64 %rd8, [wrong];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %nctaid.x;
    cvt.u64.u32 %rd4, %r4;
    mad.wide.u32 %rd3, %r2, %r3, %rd4;
    mul.wide.u32 %rd5, %r5, %r3;
NEXT:
    setp.ge.u64 %p1, %rd3, %rd2;
    @%p1 bra DONE;
    cvt.u32.u64 %r6, %rd3;
    mad.lo.u32 %r7, %r6, 0x9E3779B1, %r1;
    shl.b64 %rd6, %rd3, 2;
    add.u64 %rd6, %rd1, %rd6;
    {body}
    add.u64 %rd3, %rd3, %rd5;
    bra NEXT;
DONE:
    ret;
}}
"""
_FILL = "st.global.u32 [%rd6], %r7;"
_CHECK = """ld.global.u32 %r8, [%rd6];
    setp.ne.u32 %p2, %r8, %r7;
    @%p2 red.global.add.u64 [%rd8], 1;"""
PTX = (
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    + _HEAD.format(name="fill", body=_FILL)
    + _HEAD.format(name="check", body=_CHECK)
)
