"""Fast reading of arrays in a GGUF header.

A vocabulary has hundreds of thousands of entries. The `gguf` library reads them one by one. This
module reads a whole array at once.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

_STRING, _ARRAY = 8, 9


class QuickArrays:
    """Mixin that replaces how the library's reader reads arrays. It must be the first base class.

    Attributes:
        reads: number of values read from the header so far.
    """

    data: Any
    byte_order: str
    gguf_scalar_to_np: Any
    reads: int
    _get: Any

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        usual = super()._get_field_parts  # type: ignore[misc]
        if raw_type != _ARRAY or self.byte_order == "S":
            return usual(orig_offs, raw_type)
        item, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kinds = {type.value: (type, dtype) for type, dtype in self.gguf_scalar_to_np.items()}
        start, length = orig_offs + 12, int(count[0])
        if item[0] in kinds:
            kind, dtype = kinds[item[0]]
            self.count(length)
            values = self._get(start, dtype, length)
            types = [type(kind)(_ARRAY), kind]
            return 12 + values.nbytes, [item, count, values], [2], types
        if item[0] != _STRING:
            return usual(orig_offs, raw_type)
        kind = next(iter(self.gguf_scalar_to_np))
        texts, end = self._strings(start, length)
        types = [type(kind)(_ARRAY), type(kind)(_STRING)]
        return end - orig_offs, [item, count, *texts], list(range(2, 2 + length)), types

    def _strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """Returns `count` strings that begin at byte `start`, and the byte after the last one."""
        buffer = memoryview(self.data)
        texts = []
        self.count(2 * count)
        try:
            for _ in range(count):
                (size,) = struct.unpack_from("<Q", buffer, start)
                end = start + 8 + size
                if end > len(buffer):
                    raise ValueError("the file ends in the middle of a field")
                texts.append(buffer[start + 8 : end])
                start = end
        except struct.error as error:
            raise ValueError("the file ends in the middle of a field") from error
        return texts, start

    def count(self, values: int) -> None:
        """Adds the number of values of an array to `reads`.

        Raises:
            ValueError: the header has more values than the limit.
        """
        raise NotImplementedError
