"""Inline assembly in Triton's interpreter: the PTX instructions that kernels here use, on numpy.

Each element of a tensor is a thread's register, 32 threads a warp, as tensors of one axis are
compiled with one element a thread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

Words = NDArray[np.uint32]
_HALF = {"bf16": torch.bfloat16, "f16": torch.float16}


def floats(words: Words, kind: str) -> NDArray[np.float64]:
    """Returns the 16-bit floats in words, [..., 2], the low one first."""
    halves = torch.from_numpy(words[..., None].copy().view(np.int16))
    found: NDArray[np.float64] = halves.view(_HALF[kind]).double().numpy()
    return found


def _words(values: NDArray[np.float64], kind: str) -> Words:
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(_HALF[kind])
    return rounded.view(torch.int16).numpy().view(np.uint32)[..., 0]


def _permute(low: Words, high: Words, places: Words) -> Words:
    """Selects bytes of a pair of words (prmt). If bit 3 of a selector is set, the byte's sign bit
    is replicated."""
    pair = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(pair)
    for byte in range(4):
        place = places.astype(np.uint64) >> np.uint64(4 * byte) & np.uint64(15)
        own = pair >> (np.uint64(8) * (place & np.uint64(7))) & np.uint64(255)
        own = np.where(place > 7, np.where(own > 127, np.uint64(255), np.uint64(0)), own)
        out |= own << np.uint64(8 * byte)
    return out.astype(np.uint32)


def _multiply(a: list[Words], b: list[Words], c: list[Words], kind: str) -> list[Words]:
    """m16n8k16: A's 16 rows and B's 8 columns, laid out over the threads of a warp."""
    warps = len(c[0]) // 32

    def pairs(registers: list[Words]) -> NDArray[np.float64]:
        """[register, warp, lane / 4, lane % 4, place in a pair]"""
        return np.stack([floats(r, kind).reshape(warps, 8, 4, 2) for r in registers])

    left = np.zeros((warps, 16, 16))
    for register, part in enumerate(pairs(a)):
        rows = slice(8 * (register % 2), 8 * (register % 2) + 8)
        columns = slice(8 * (register // 2), 8 * (register // 2) + 8)
        left[:, rows, columns] = part.reshape(warps, 8, 8)
    right = np.zeros((warps, 16, 8))
    for register, part in enumerate(pairs(b)):
        inputs = slice(8 * register, 8 * register + 8)
        right[:, inputs] = part.reshape(warps, 8, 8).transpose(0, 2, 1)
    product = (left @ right).reshape(warps, 2, 8, 4, 2)
    sums = []
    for register, own in enumerate(c):
        part = product[:, register // 2, :, :, register % 2].reshape(-1)
        sums.append((own.view(np.float32) + part).astype(np.float32).view(np.uint32))
    return sums


def _multiply_bytes(a: list[Words], b: list[Words], c: list[Words], kind: Any) -> list[Words]:
    """m16n8k32 of bytes of a kind, A, and signed bytes, B."""
    warps = len(c[0]) // 32
    left = np.zeros((warps, 16, 32), np.int64)
    for register, own in enumerate(a):
        rows = slice(8 * (register % 2), 8 * (register % 2) + 8)
        columns = slice(16 * (register // 2), 16 * (register // 2) + 16)
        left[:, rows, columns] = own.view(kind).reshape(warps, 8, 16)
    right = np.zeros((warps, 32, 8), np.int64)
    for register, own in enumerate(b):
        inputs = slice(16 * register, 16 * register + 16)
        right[:, inputs] = own.view(np.int8).reshape(warps, 8, 16).transpose(0, 2, 1)
    product = (left @ right).reshape(warps, 2, 8, 4, 2)
    return [
        (own.view(np.int32) + product[:, at // 2, :, :, at % 2].reshape(-1))
        .astype(np.int32)
        .view(np.uint32)
        for at, own in enumerate(c)
    ]


def _product(op: str, a: list[Words], b: list[Words], c: list[Words]) -> list[Words]:
    left, right = op.split(".")[-3:-1]
    if right == "s8":
        return _multiply_bytes(a, b, c, np.int8 if left == "s8" else np.uint8)
    return _multiply(a, b, c, right)


class _Shared:
    """The shared memory of the running program, in words. Unwritten words are undefined."""

    words = np.zeros(0, np.uint32)

    @classmethod
    def reserve(cls, size: int) -> None:
        cls.words = np.full(size // 4, 0xDEADBEEF, np.uint32)


class _Threads:
    """Registers by name, arrays over threads."""

    def __init__(self, outputs: int, inputs: list[Any]) -> None:
        self.size = max(np.size(value) for value in inputs)
        self.registers: dict[str, Any] = {
            f"${outputs + i}": np.broadcast_to(np.asarray(value).reshape(-1), (self.size,))
            for i, value in enumerate(inputs)
        }

    def read(self, name: str) -> Any:
        if name.startswith("0f"):
            return np.full(self.size, int(name[2:], 16), np.uint32)
        if name[0].isdigit() or name[0] == "-":
            return np.full(self.size, int(name, 0) & 0xFFFFFFFF, np.uint32)
        value = self.registers[name]
        return value if value.itemsize == 8 else np.ascontiguousarray(value).view(np.uint32)

    def _other_threads(self, op: str, lane: Words, groups: Words) -> NDArray[np.int64]:
        threads = np.arange(self.size)
        if ".bfly." in op:
            return threads ^ lane
        assert ".idx." in op, "not emulated"
        assert (groups == 0x1C1F).all(), "others than fours are not emulated"
        return threads // 4 * 4 + lane

    def run(self, guard: str, op: str, names: list[list[str]]) -> None:
        wanted = self.registers[guard] if guard else np.ones(self.size, bool)
        if op == "bar.warp.sync":
            return
        if op.startswith("ld.global"):
            addresses = self.read(names[1][0])
            for index, out in enumerate(names[0]):
                own = (addresses + np.uint64(4 * index)).astype(np.uint64)
                # Registers that are not loaded keep their content, or hold
                # anything, such as NaN.
                other = self.registers.get(out, np.full(self.size, 0x7FC17FC1, np.uint32))
                self.registers[out] = interpreter._interpreter.load(
                    own, wanted, other, np.dtype(np.uint32)
                )
        elif op == ".shared":
            _Shared.reserve(int(names[-1][0]))
            self.registers[names[-2][0]] = np.zeros(self.size, np.uint32)
        elif op.startswith("ld.shared"):
            for index, out in enumerate(names[0]):
                self.registers[out] = _Shared.words[self.read(names[1][0]) // 4 + index]
        elif op.startswith("st.shared"):
            for index, name in enumerate(names[1]):
                places = self.read(names[0][0])[wanted] // 4 + index
                _Shared.words[places] = self.read(name)[wanted]
        elif op.startswith("shfl.sync"):
            other = self._other_threads(op, *(self.read(own[0]) for own in names[2:4]))
            self.registers[names[0][0]] = self.read(names[1][0])[other]
        elif op.startswith("mma.sync"):
            a, b, c = ([self.read(name) for name in own] for own in names[1:])
            for out, value in zip(names[0], _product(op, a, b, c), strict=True):
                self.registers[out] = value
        elif op == "setp.ne.s32":
            self.registers[names[0][0]] = self.read(names[1][0]) != self.read(names[2][0])
        else:
            values = [self.read(own[0]) for own in names[1:]]
            value = _OPS[op](values)
            parts = [value] if len(names[0]) == 1 else [value & 0xFFFF, value >> 16]
            self.registers.update(zip(names[0], parts, strict=True))


def _narrow(values: list[Words]) -> Words:
    """Converts two fp32 numbers to 8-bit floats, the first in the high byte."""
    numbers = np.stack([values[1], values[0]], -1).view(np.float32)
    bytes_ = torch.from_numpy(numbers.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return bytes_.view(torch.int16).numpy().view(np.uint16)[..., 0].astype(np.uint32)


def _widened(values: list[Words]) -> Words:
    """Converts two 8-bit floats to fp16."""
    halves = torch.from_numpy(values[0].astype(np.uint16).view(np.int16)[..., None].copy())
    return _words(halves.view(torch.float8_e4m3fn).double().numpy(), "f16")


def _halves(kind: str, own: Callable[..., Any]) -> Callable[[list[Words]], Words]:
    return lambda values: _words(own(*(floats(value, kind) for value in values)), kind)


_OPS: dict[str, Callable[[list[Words]], Words]] = {
    "mov.b32": lambda v: v[0],
    "mov.u32": lambda v: v[0],
    "shr.u32": lambda v: v[0] >> v[1],
    "shl.b32": lambda v: v[0] << v[1],
    "and.b32": lambda v: v[0] & v[1],
    "mul.lo.u32": lambda v: v[0] * v[1],
    "xor.b32": lambda v: v[0] ^ v[1],
    "prmt.b32": lambda v: _permute(v[0], v[1], v[2]),
    "sub.f32": lambda v: (v[0].view(np.float32) - v[1].view(np.float32)).view(np.uint32),
    "cvt.rn.f16x2.f32": lambda v: _words(
        np.stack([v[1].view(np.float32), v[0].view(np.float32)], -1), "f16"
    ),
    "cvt.rn.satfinite.e4m3x2.f32": _narrow,
    "cvt.rn.f16x2.e4m3x2": _widened,
    "max.NaN.xorsign.abs.bf16x2": lambda v: _words(
        np.maximum(*(np.abs(floats(value, "bf16")) for value in v)), "bf16"
    ),
    **{f"fma.rn.{kind}x2": _halves(kind, lambda a, b, c: a * b + c) for kind in _HALF},
    **{f"mul.rn.{kind}x2": _halves(kind, lambda a, b: a * b) for kind in _HALF},
    **{f"sub.rn.{kind}x2": _halves(kind, lambda a, b: a - b) for kind in _HALF},
}


def _lop3(values: list[Words]) -> Words:
    assert int(values[3][0]) == 0xEA
    return (values[0] & values[1]) | values[2]


_OPS["lop3.b32"] = _lop3


@functools.cache
def _lines(text: str) -> list[tuple[str, str, list[list[str]]]]:
    """Returns the guard, the name and the operands of each instruction."""
    lines = []
    for line in (part.strip() for part in text.strip("{}\n ").replace("\n", " ").split(";")):
        if line and not line.startswith(".reg"):
            guard = re.match(r"@(\w+) ", line)
            op, _, rest = (line[guard.end() :] if guard else line).partition(" ")
            groups = re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,{}\[\]\s]+)", rest)
            names = [[part.strip() for part in "".join(group).split(",")] for group in groups]
            lines.append((guard.group(1) if guard else "", op, names))
    return lines


def run(text: str, outputs: int, inputs: list[Any]) -> list[Any]:
    """Returns the outputs of instructions, one array over threads for each."""
    threads = _Threads(outputs, inputs)
    with np.errstate(all="ignore"):
        for line in _lines(text):
            threads.run(*line)
    return [threads.registers[f"${i}"] for i in range(outputs)]


class _Results:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def get_result(self, index: int) -> Any:
        return self.values[index]


def _create(
    self: Any, text: str, constraints: str, inputs: list[Any], types: list[Any], pure: bool,
    pack: int,
) -> _Results:  # fmt: skip
    assert pack == 1
    found = run(text, len(types), [handle.data for handle in inputs])
    handles = []
    for value, own in zip(found, types, strict=True):
        scalar = getattr(own, "element_ty", own)
        data = np.ascontiguousarray(value).view(interpreter._get_np_dtype(scalar))
        handles.append(interpreter.TensorHandle(data, scalar))
    return _Results(handles)


def install() -> None:
    """Makes the interpreter run inline assembly in this process, permanently."""
    interpreter.InterpreterBuilder.create_inline_asm = _create
