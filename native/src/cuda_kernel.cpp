#include "cuda_kernel.h"

namespace datastates::cuda {

// Each thread copies units of the largest width that both addresses are aligned to, and the first
// few threads what is left behind the last unit. Whatever the width, neighbouring threads copy
// neighbouring units: so the writes of a warp leave together, as whole packets on the link.
const char* const kKernelPtx = R"ptx(
.version 6.0
.target sm_50
.address_size 64

.visible .entry dcp_datastates_copy(.param .align 8 .b8 pieces[3840])
{
    .reg .pred  %p;
    .reg .b16   %h;
    .reg .b32   %piece, %nbytes, %thread, %slice, %threads, %slices;
    .reg .b32   %first, %step, %bits, %low, %at, %stride, %body, %a, %b, %c, %d;
    .reg .b64   %list, %entry, %to, %from, %both, %offset, %source, %target;

    mov.u32             %piece, %ctaid.x;
    mov.b64             %list, pieces;
    mad.wide.u32        %entry, %piece, 8, %list;
    ld.param.u64        %to, [%entry];
    ld.param.u64        %from, [%entry+1536];
    mad.wide.u32        %entry, %piece, 4, %list;
    ld.param.u32        %nbytes, [%entry+3072];
    cvta.to.global.u64  %to, %to;
    cvta.to.global.u64  %from, %from;

    // In units: where this thread begins, and how far it is to its next.
    mov.u32             %thread, %tid.x;
    mov.u32             %slice, %ctaid.y;
    mov.u32             %threads, %ntid.x;
    mov.u32             %slices, %nctaid.y;
    mad.lo.u32          %first, %slice, %threads, %thread;
    mul.lo.u32          %step, %threads, %slices;

    or.b64              %both, %to, %from;
    cvt.u32.u64         %bits, %both;
    and.b32             %low, %bits, 15;
    setp.eq.u32         %p, %low, 0;
    @%p bra             OF_16;
    and.b32             %low, %bits, 3;
    setp.eq.u32         %p, %low, 0;
    @%p bra             OF_4;
    and.b32             %low, %bits, 1;
    setp.eq.u32         %p, %low, 0;
    @%p bra             OF_2;
    mov.u32             %body, 0;
    mov.u32             %at, %first;
    mov.u32             %stride, %step;
    bra                 NEXT_1;

OF_16:
    and.b32             %body, %nbytes, 0xFFFFFFF0;
    shl.b32             %at, %first, 4;
    shl.b32             %stride, %step, 4;
NEXT_16:
    setp.ge.u32         %p, %at, %body;
    @%p bra             REST;
    cvt.u64.u32         %offset, %at;
    add.u64             %source, %from, %offset;
    add.u64             %target, %to, %offset;
    ld.global.v4.u32    {%a, %b, %c, %d}, [%source];
    st.global.v4.u32    [%target], {%a, %b, %c, %d};
    add.u32             %at, %at, %stride;
    bra                 NEXT_16;

OF_4:
    and.b32             %body, %nbytes, 0xFFFFFFFC;
    shl.b32             %at, %first, 2;
    shl.b32             %stride, %step, 2;
NEXT_4:
    setp.ge.u32         %p, %at, %body;
    @%p bra             REST;
    cvt.u64.u32         %offset, %at;
    add.u64             %source, %from, %offset;
    add.u64             %target, %to, %offset;
    ld.global.u32       %a, [%source];
    st.global.u32       [%target], %a;
    add.u32             %at, %at, %stride;
    bra                 NEXT_4;

OF_2:
    and.b32             %body, %nbytes, 0xFFFFFFFE;
    shl.b32             %at, %first, 1;
    shl.b32             %stride, %step, 1;
NEXT_2:
    setp.ge.u32         %p, %at, %body;
    @%p bra             REST;
    cvt.u64.u32         %offset, %at;
    add.u64             %source, %from, %offset;
    add.u64             %target, %to, %offset;
    ld.global.u16       %h, [%source];
    st.global.u16       [%target], %h;
    add.u32             %at, %at, %stride;
    bra                 NEXT_2;

REST:
    add.u32             %at, %body, %first;
    mov.u32             %stride, %step;
NEXT_1:
    setp.ge.u32         %p, %at, %nbytes;
    @%p bra             DONE;
    cvt.u64.u32         %offset, %at;
    add.u64             %source, %from, %offset;
    add.u64             %target, %to, %offset;
    ld.global.u8        %h, [%source];
    st.global.u8        [%target], %h;
    add.u32             %at, %at, %stride;
    bra                 NEXT_1;

DONE:
    ret;
}
)ptx";

}  // namespace datastates::cuda
