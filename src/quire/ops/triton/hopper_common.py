"""Parts that Gluon kernels for Hopper cards share, and the differences of Triton's versions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language import core

# Triton 3.6 calls it `thread_barrier`.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Triton 3.6 and 3.7 call both `async_copy_global_to_shared`.
load_box, copy_async = (
    module.async_load if hasattr(module, "async_load") else module.async_copy_global_to_shared
    for module in (tma, async_copy)
)


@core.builtin
def reinterpret(tiles, dtype, shape, layout, _semantic=None):
    """Returns shared memory under another type, shape and layout."""
    # The method is public from Triton 3.9 on.
    name = "reinterpret" if hasattr(tiles, "reinterpret") else "_reinterpret"
    return getattr(tiles, name)(dtype, shape, layout, _semantic=_semantic)


@core.builtin
def concat(first, second, _semantic=None):
    """Returns the tuple of all values of two tuples.

    From Triton 3.8 on, `+` turns constexprs of the second tuple into plain numbers, and workers of
    `warp_specialize` do not accept these."""
    return core.tuple([*first, *second])


@gluon.constexpr_function
def sums_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Returns the layout of a warpgroup's sums [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def wait_for_predecessor():
    """Waits for the preceding kernel, see `launch.py`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def release_successor():
    """Lets the next kernel start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_and_release():
    """Waits for the preceding kernel, then lets the next one start."""
    wait_for_predecessor()
    release_successor()
