"""Makes Triton's interpreter cost less than half.

At every call of a device function the interpreter replaces the functions of `triton.language` anew,
although they stay replaced until the launch ends; for every value it builds a table of all dtypes.
Here the first is done once per launch and module, the second once per dtype.
"""

from __future__ import annotations

import gc
from typing import Any

from triton.runtime import interpreter


def reuse_what_stays() -> None:
    """Replaces four functions of the interpreter, in this process, for good."""
    patched: set[int] = set()
    dtypes: dict[tuple[type, str], Any] = {}
    launch = interpreter.GridExecutor.__call__
    find_dtype = interpreter._get_np_dtype
    rewrite_source = interpreter.FunctionRewriter.rewrite_ast

    def run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the end of the launch before has restored the language
        launch(self, *args, **kwargs)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def numpy_dtype(dtype: Any) -> Any:
        key = type(dtype), dtype.name
        if key not in dtypes:
            dtypes[key] = find_dtype(dtype)
        return dtypes[key]

    def rewrite_ast(self: Any) -> Any:
        # A collection may run finalizers that parse code themselves (a traceback does), and Python
        # 3.11 fails if one parse interrupts another.
        gc.disable()
        try:
            return rewrite_source(self)
        finally:
            gc.enable()

    interpreter.FunctionRewriter.rewrite_ast = rewrite_ast  # type: ignore[method-assign]
    interpreter.GridExecutor.__call__ = run_grid  # type: ignore[method-assign]
    interpreter.InterpretedFunction.__call__ = call_device_function  # type: ignore[method-assign]
    interpreter._get_np_dtype = numpy_dtype
