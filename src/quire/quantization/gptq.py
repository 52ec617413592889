"""Checkpoints of GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.ops import WeightFormat
from quire.quantization import fields
from quire.quantization.checkpoint_tensor import FLOATS, CheckpointTensor
from quire.quantization.fields import Settings, Tensors, unsupported
from quire.quantization.packed import (
    INT32,
    GroupIndex,
    GroupScales,
    PackedValues,
    PackedZeros,
    ZeroBias,
)
from quire.quantization.quantization import Scheme


@dataclass(frozen=True, slots=True)
class Gptq:
    """The settings of a GPTQ checkpoint.

    Attributes:
        settings: settings of the checkpoint.
        rules: patterns of module names with changed settings, or with None if the modules are not
            quantized. The first match applies.
        head: whether the head is quantized.
    """

    settings: Settings
    rules: tuple[tuple[re.Pattern[str], Settings | None], ...]
    head: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> Gptq:
        # transformers 5 renamed "checkpoint_format" to "format".
        format = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        settings = {**settings, "checkpoint_format": format}
        fields.one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"))
        fields.one_of(settings, "pack_dtype", ("int32",), "int32")
        for name in ("is_marlin_format", "modules_in_block_to_quantize", "adapter"):
            if settings.get(name):
                raise unsupported(f"{name} {settings[name]!r}")
        dynamic = settings.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise unsupported(f"dynamic must be an object, got {dynamic!r}")
        made = cls(
            settings,
            tuple(_rule(pattern, changes) for pattern, changes in dynamic.items()),
            fields.flag(settings, "lm_head", False),
        )
        made._scheme("", settings, {})
        return made

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        if head and not self.head:
            return None
        settings = self.settings
        for pattern, changes in self.rules:
            if pattern.match(module):
                if changes is None:
                    return None
                settings = {**settings, **changes}
                break
        return self._scheme(module, settings, tensors)

    def _scheme(self, module: str, settings: Settings, tensors: Tensors) -> Scheme:
        bits = fields.one_of(settings, "bits", (4, 8))
        group = fields.group_size(settings)
        symmetric = fields.flag(settings, "sym", True)
        inputs_per = group or None
        ordered = fields.flag(settings, "desc_act", False) and group > 0
        middle = 2 ** (bits - 1)
        format = WeightFormat(
            torch.uint8 if bits == 4 else torch.int8,
            bits=4 if bits == 4 else 0,
            scales=fields.scale_dtype(tensors, f"{module}.scales"),
            group=group,
            zeros=not symmetric,
            ordered=ordered,
        )
        stored: list[CheckpointTensor] = [
            PackedValues("qweight", "values", INT32, bits=bits, inputs_first=True),
            GroupScales("scales", "scales", FLOATS, inputs_per=inputs_per, every_group=ordered),
            PackedZeros(
                "qzeros",
                "zeros",
                INT32,
                inputs_per=inputs_per,
                every_group=ordered,
                bits=bits,
                expected=(middle - 1, middle) if symmetric else (),
                offset=0 if symmetric else _zero_offset(settings),
            ),
        ]
        if ordered or f"{module}.g_idx" in tensors:
            stored.append(GroupIndex("g_idx", "groups", INT32, inputs_per=inputs_per))
        if f"{module}.bias" in tensors:
            stored.append(ZeroBias("bias", "values", FLOATS, inputs_per=None))
        return Scheme(format, tuple(stored))


def _rule(pattern: str, changes: Any) -> tuple[re.Pattern[str], Settings | None]:
    try:
        compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
    except re.error as error:
        raise unsupported(f"dynamic: {pattern!r} is not a regular expression: {error}") from error
    if pattern.startswith("-:"):
        return compiled, None
    if not isinstance(changes, Mapping):
        raise unsupported(
            f"dynamic: the settings of {pattern!r} must be an object, got {changes!r}"
        )
    return compiled, changes


def _zero_offset(settings: Settings) -> int:
    """Returns the number to add to stored zeros: 1 in version 1 of the format, 0 in version 2.

    GPTQModel 5 writes version 2 under the name of version 1. Symmetric weights reveal the version
    by their constant zero. Asymmetric weights do not, so those of GPTQModel 5 are refused.
    """
    if settings["checkpoint_format"] == "gptq_v2":
        return 0
    meta = settings.get("meta")
    writers = meta.get("quantizer") or [] if isinstance(meta, Mapping) else []
    for writer in [writers] if isinstance(writers, str) else writers:
        found = re.fullmatch(r"gptqmodel:(\d+)\b.*", str(writer))
        if found and int(found[1]) >= 5:
            raise unsupported(
                f"sym is false and checkpoint_format is gptq, but {writer} may have stored the "
                "zeros of gptq_v2"
            )
    return 1
