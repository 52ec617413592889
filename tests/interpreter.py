"""Makes Triton's interpreter five times as fast.

At every call of a device function the interpreter replaces the functions of `triton.language`,
although they stay replaced until the launch ends. For every value it builds a table of all dtypes,
the value's type and shape, and wrappers of both. It also computes whether integer sums overflow,
even when it does not debug. Here functions are replaced once per launch and module, tables are
built once per dtype, and types once. Overflow is computed only for debugging. Where it reduces with
a kernel's own function, it calls that for each element; here for each half of them. Operands of one
type, and numbers beside tensors, skip the promotion of types that changes nothing, and floats of 8
and 16 bits are converted by tables and by shifts.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

_numbers: dict[Any, Any] = {}
"""Tensors of one number, of the launch that runs."""


def reuse_what_stays() -> None:
    """Replaces functions of the interpreter and of the language in this process, permanently."""
    _patch_once_a_launch()
    _share_types()
    _shorten_checks()
    _call_directly()
    _share_numbers()
    _convert_by_tables()
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves  # type: ignore[method-assign]
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(
            options, sanitize_overflow=False
        )


def _patch_once_a_launch() -> None:
    patched: set[int] = set()
    dtypes: dict[tuple[type, str], Any] = {}
    launch = interpreter.GridExecutor.__call__
    find_dtype = interpreter._get_np_dtype
    rewrite_source = interpreter.FunctionRewriter.rewrite_ast

    def run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the end of the launch before has restored the language
        _numbers.clear()
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


def _share_types() -> None:
    """Creates block types, and the attributes that tensors derive from them, once per type."""
    made: dict[Any, dict[str, Any]] = {}
    make_type = core.block_type.__init__
    no_shape, one = core.tuple([]), core.constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:
            make_type(self, element_ty, shape)
            return
        lengths = tuple(n.value if type(n) is core.constexpr else n for n in shape)
        if (element_ty.name, lengths) not in made:
            make_type(self, element_ty, shape)
            _held_by_tensors(self)
            made[element_ty.name, lengths] = dict(self.__dict__)
        self.__dict__.update(made[element_ty.name, lengths])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = _held_by_tensors(type) if type.is_block() else (no_shape, one)

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        if not dtype.is_ptr() and 8 * data.itemsize > max(8, dtype.primitive_bitwidth):
            self.__post_init__()

    others: dict[Any, Any] = {}
    change_element = core.block_type.with_element_ty

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not core.dtype:
            return change_element(self, scalar_ty)
        key = scalar_ty.name, *self.shape.values
        if key not in others:
            others[key] = change_element(self, scalar_ty)
        return others[key]

    def get_block_ty(self: Any, element_ty: Any, shape: Any) -> Any:
        key = element_ty.name, *shape
        return others[key] if key in others else core.block_type(element_ty, shape)

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        filled = np.empty(ret_ty.shape, interpreter._get_np_dtype(arg.dtype))
        filled[...] = arg.data[0] if arg.data.ndim else arg.data
        return interpreter.TensorHandle(filled, arg.dtype.scalar)

    interpreter.InterpreterBuilder.get_block_ty = get_block_ty
    interpreter.InterpreterBuilder.create_splat = create_splat
    core.block_type.with_element_ty = with_element_ty
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter.TensorHandle.__init__ = handle


def _held_by_tensors(type: Any) -> tuple[Any, Any]:
    """Returns the shape and the number of elements of a block type."""
    if "_held" not in type.__dict__:
        type._held = core.tuple([core.constexpr(n) for n in type.shape]), core.constexpr(type.numel)
    held: tuple[Any, Any] = type._held
    return held


def _shorten_checks() -> None:
    """Handles the common types first in the language's type checks of every value."""
    equal_dtypes, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def equal(self: Any, other: Any) -> bool:
        return self is other or equal_dtypes(self, other)

    plain = {bool, float, int, str, type(None), core.block_type, core.dtype, core.tensor}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() != right.is_block():
            return broadcast(self, lhs, rhs)
        same = not left.is_block() or left.shape.values == right.shape.values
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    core.dtype.__eq__ = equal
    core._unwrap_if_constexpr = unwrap_if_constexpr
    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _call_directly() -> None:
    """Replaces the three nested calls with which the interpreter calls a language function by
    one."""
    language = interpreter.interpreter_semantic

    def patch(scope: Any, name: str, member: Any, builder: Any, patches: Any) -> None:
        function = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = language
            return function(*args, **kwargs)

        patches.set_attr(scope, name, call)

    interpreter._patch_attr = patch


def _share_numbers() -> None:
    """Makes the tensor of a number once per launch for all tensor operands of one type and
    shape."""
    promote = semantic.TritonSemantic.binary_op_type_checking_impl

    def operands(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if self is not interpreter.interpreter_semantic or not (left or right):
            return promote(self, lhs, rhs, *args, **kwargs)
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        if type(tensor.dtype) is not core.dtype:
            return promote(self, lhs, rhs, *args, **kwargs)
        if left and right:
            # The third argument, whether pointers are allowed, changes nothing here.
            if lhs.dtype is rhs.dtype and len(args) < 3 and not kwargs:
                return self.broadcast_impl_value(lhs, rhs)
            return promote(self, lhs, rhs, *args, **kwargs)
        if type(number) not in (int, float):
            return promote(self, lhs, rhs, *args, **kwargs)
        # The text form distinguishes 0.0 from -0.0.
        shape = tensor.type.shape.values if tensor.type.is_block() else ()
        key = repr(number), tensor.dtype.name, left, args, *kwargs.items(), *shape
        if key not in _numbers:
            made = promote(self, lhs, rhs, *args, **kwargs)
            if (made[0] if left else made[1]) is not tensor:
                return made
            _numbers[key] = made[1] if left else made[0]
            _numbers[key].handle.data.flags.writeable = False
        return (lhs, _numbers[key]) if left else (_numbers[key], rhs)

    semantic.TritonSemantic.binary_op_type_checking_impl = operands


def _convert_by_tables() -> None:
    """Converts floats of 8 bits by tables of the interpreter's own results, and bfloat16 to float32
    and back, which the interpreter cuts off, by a shift."""
    tables: dict[Any, Any] = {}
    convert, bf16, fp32 = interpreter._convert_float, core.bfloat16, core.float32

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source is bf16 and target is fp32:
            return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
        if source is fp32 and target is bf16 and rounding is None:
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if source.primitive_bitwidth != 8:
            return convert(values, source, target, rounding)
        key = source.name, target.name, rounding
        if key not in tables:
            tables[key] = convert(np.arange(256, dtype=np.uint8), source, target, rounding)
        return tables[key][values.view(np.uint8)]

    interpreter._convert_float = convert_float


def _reduce_by_halves(self: Any, given: Any) -> list[Any]:
    """Reduces neighbours in pairs until one value is left."""
    tensors, axis = self.unravel(given, self.axis)
    values = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    while len(values[0]) > 1:
        halves = [
            self.to_tensor(value[start::2], dtype)
            for start in (0, 1)
            for value, dtype in zip(values, dtypes, strict=True)
        ]
        found = self.combine_fn.fn(*halves)
        found = found if isinstance(found, (tuple, core.tuple)) else (found,)
        values = [
            self.to_tensor(one.handle.data, dtype).handle.data
            for one, dtype in zip(found, dtypes, strict=True)
        ]
    reduced = []
    for value, dtype in zip(values, dtypes, strict=True):
        last = value[0]
        if self.keep_dims and self.axis is None:
            last = last.reshape((1,) * given[0].handle.data.ndim)
        elif self.keep_dims:
            last = np.expand_dims(last, axis)
        reduced.append(self.to_tensor(last, dtype))
    return reduced
