"""Checkpoints of AWQ (Lin et al. 2023) as AutoAWQ writes them for its "gemm" kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.ops import WeightFormat
from quire.quantization import fields
from quire.quantization.checkpoint_tensor import FLOATS
from quire.quantization.fields import Settings, Tensors, unsupported
from quire.quantization.packed import AWQ_ORDER, INT32, GroupScales, PackedValues, PackedZeros
from quire.quantization.quantization import Scheme


@dataclass(frozen=True, slots=True)
class Awq:
    """The settings of an AWQ checkpoint.

    Attributes:
        group: inputs that share a scale, 0 for all.
        exceptions: modules whose name contains one of these are not quantized.
    """

    group: int
    exceptions: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: Settings) -> Awq:
        own = {"bits": settings.get("w_bit"), "group_size": settings.get("q_group_size")}
        settings = {**{key: value for key, value in own.items() if value is not None}, **settings}
        fields.one_of(settings, "bits", (4,))
        # transformers 5 renamed "version" to "format".
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if version != "gemm":
            raise unsupported(f"version {version!r}; expected: gemm")
        if not fields.flag(settings, "zero_point", True):
            raise unsupported("awq without zero points")
        return cls(fields.group_size(settings), fields.names(settings, "modules_to_not_convert"))

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        if head or any(
            name in alias for name in self.exceptions for alias in fields.aliases(module)
        ):
            return None
        format = WeightFormat(
            torch.uint8,
            bits=4,
            scales=fields.scale_dtype(tensors, f"{module}.scales"),
            group=self.group,
            zeros=True,
        )
        inputs_per = self.group or None
        return Scheme(
            format,
            (
                PackedValues(
                    "qweight", "values", INT32, axis="outputs", inputs_first=True, order=AWQ_ORDER
                ),
                GroupScales("scales", "scales", FLOATS, inputs_per=inputs_per),
                PackedZeros("qzeros", "zeros", INT32, inputs_per=inputs_per, order=AWQ_ORDER),
            ),
        )
