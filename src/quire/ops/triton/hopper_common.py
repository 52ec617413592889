"""Parts that kernels for Hopper cards in Gluon share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def sums_layout(columns: int) -> gl.NVMMADistributedLayout:
    """The layout of a warpgroup's sums [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def wait_for_predecessor():
    """Waits for the kernel before; see `launch.py`."""
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
    """Waits for the kernel before, then lets the next one start."""
    wait_for_predecessor()
    release_successor()
