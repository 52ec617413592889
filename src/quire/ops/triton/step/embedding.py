"""Embedding look-up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits


@triton.jit
def _embed(
    ids_ptr, table_ptr, out_ptr, width, start, count, table_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.load(ids_ptr + row).to(tl.int64) - start
    inside = at < width
    # An id outside of this shard, such as -1 for padding, reads nothing and gives zeros.
    ours = tl.where(inside, entry, -1)
    ours = (ours >= 0) & (ours < count)
    values = tl.load(table_ptr + entry * table_stride + at, mask=ours, other=0.0)
    tl.store(out_ptr + row * width + at, values, mask=inside)


def embedding(ids: Tensor, table: Tensor, start: int = 0, *, pdl: bool | None = None) -> Tensor:
    """Returns rows of an embedding table, [T, width] in the table's dtype.

    Ids outside of the table give zeros, such as padding (-1) or ids of another rank's shard.

    Args:
        ids: int [T].
        table: [entries, width], the rows of ids from `start` on.
    """
    entries, width = table.shape
    out = torch.empty((ids.shape[0], width), dtype=table.dtype, device=table.device)
    if ids.shape[0] == 0:
        return out
    block = min(triton.next_power_of_2(width), 2048)
    use_pdl = traits(ids.device).pdl if pdl is None else pdl
    launch(_embed, (ids.shape[0], triton.cdiv(width, block)))(
        ids, table, out, width, start, entries, table.stride(0), BLOCK=block, PDL=use_pdl,
        **options(use_pdl, num_warps=min(max(block // 256, 1), 8)),
    )  # fmt: skip
    return out
