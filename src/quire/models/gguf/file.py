"""A GGUF file's tensors under the names of Hugging Face's checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.gguf.arrays import QuickArrays
from quire.quantization.gguf import BLOCKS, dequantize_rows, library
from quire.weight_files import open_regular

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PLAIN = {
    "F32": ("F32", torch.float32),
    "F16": ("F16", torch.float16),
    "BF16": ("BF16", torch.bfloat16),
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of rotary frequencies, a form of scaling that config.json has as settings."""
_ROWS = 4096
"""Rows of a table that are dequantized at once."""
_MOST_READS = 3 << 20
"""Values of a header. Vocabularies of 200,000 tokens, with merges, have 1.5 million."""


def stored_name(name: str) -> str:
    """Returns the name in a Hugging Face checkpoint; a name that is not known stays."""
    stem, _, tensor = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{tensor}"
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INNER:
        return name
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


class GgufFile:
    """Reads like a file of safetensors: `keys`, `get_slice`, `get_tensor`. Nothing is read before
    it is asked for. Weights of blocks are bytes; tables of them are dequantized.

    fields: the file's settings. types: the type of each tensor, by its name in a checkpoint.

    Raises:
        ModelError: it is no such file.
        ConfigError: the library that reads such files is not installed.
    """

    def __init__(self, path: Path) -> None:
        gguf = library()
        try:
            with open_regular(path) as file:
                reader = _bounded_reader(gguf, file)
            self.fields: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise ModelError(f"cannot read {path.name}: {error}") from error
        except RecursionError:
            raise ModelError(f"cannot read {path.name}: its arrays are nested too deeply") from None
        tensors = {stored_name(tensor.name): tensor for tensor in reader.tensors}
        self._factors = tensors.pop(ROPE_FACTORS, None)
        self._tensors: dict[str, Any] = tensors
        self.types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}

    @property
    def rope_factors(self) -> Tensor | None:
        """Divisors of the rotary frequencies, float32 [head size / 2]."""
        return None if self._factors is None else torch.from_numpy(np.array(self._factors.data))

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> GgufTensor:
        return GgufTensor(self._tensors[name], self.types[name], self._heads(name), name)

    def get_tensor(self, name: str) -> Tensor:
        found = self.get_slice(name)
        return found[tuple(slice(0, size) for size in found.get_shape())]

    def _heads(self, name: str) -> int:
        """Returns the heads whose rows the file has in another order, 0: none.

        Files of llama have the two halves of each head of q and k interleaved.
        """
        if self.fields.get("general.architecture") != "llama":
            return 0
        if ".self_attn.q_proj." in name:
            return int(self.fields["llama.attention.head_count"])
        if ".self_attn.k_proj." in name:
            count = self.fields.get("llama.attention.head_count_kv")
            return int(self.fields["llama.attention.head_count"] if count is None else count)
        return 0


def _bounded_reader(gguf: Any, file: BinaryIO) -> Any:
    """Returns the library's reader of a file. The library believes each count in the file; here a
    field that the file does not hold, or a header of too many values, is a ValueError."""

    class Reader(QuickArrays, gguf.GGUFReader):  # type: ignore[misc]
        reads = 0

        def count(self, values: int) -> None:
            self.reads += values
            if self.reads > _MOST_READS:
                raise ValueError(f"its header has more than {_MOST_READS} values")

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **more: Any) -> Any:
            self.count(1)
            found = super()._get(offset, dtype, count, *rest, **more)
            if len(found) < count:
                raise ValueError("it ends in the middle of a field")
            return found

    # Pages of the file that may be written to, though nobody does: PyTorch takes no others.
    return Reader(file, "c")


class GgufTensor:
    """One tensor. heads: see `GgufFile._heads`."""

    def __init__(self, tensor: Any, type: str, heads: int, name: str) -> None:
        self._data = tensor.data
        self._type, self._heads = type, heads
        # The file has sizes from the innermost on.
        self._shape = tuple(int(size) for size in reversed(tensor.shape))
        self._blocks = type in BLOCKS and name != "model.embed_tokens.weight"
        if type not in BLOCKS and type not in _PLAIN:
            known = ", ".join((*BLOCKS, *_PLAIN))
            raise ModelError(f"{name} has the type {type}, which is not supported; known: {known}")

    def get_shape(self) -> list[int]:
        return list(self._data.shape if self._blocks else self._shape)

    def get_dtype(self) -> str:
        if self._blocks:
            return "U8"
        return _PLAIN[self._type][0] if self._type in _PLAIN else "F16"

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        rows = part[0]
        data = self._data
        data = data[self._order()[rows] if self._heads else rows]
        if self._type in _PLAIN:
            whole = torch.from_numpy(np.asarray(data)).view(_PLAIN[self._type][1])
            return whole.view(-1, *self._shape[1:])[(slice(None), *part[1:])]
        if self._blocks:
            return torch.from_numpy(np.asarray(data))[(slice(None), *part[1:])]
        out = torch.empty(len(data), *self._shape[1:], dtype=torch.float16)
        for start in range(0, len(data), _ROWS):
            some = torch.from_numpy(np.asarray(data[start : start + _ROWS]))
            out[start : start + _ROWS] = dequantize_rows(some, self._type)
        return out[(slice(None), *part[1:])]

    def _order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the file's row of each row."""
        count = self._shape[0]
        places = np.arange(count).reshape(self._heads, count // self._heads // 2, 2)
        return places.swapaxes(1, 2).reshape(-1)
