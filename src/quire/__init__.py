"""Quire, an LLM inference engine. `from quire import LLM, SamplingParams`.

Names are resolved lazily: importing the package loads neither torch nor the engine.
"""

from __future__ import annotations

import importlib

from quire.version import __version__

TYPE_CHECKING = False
"""Not typing's: with `python -m quire` the current folder could still provide that module."""
if TYPE_CHECKING:
    from quire.engine.loop.beam_search import BeamSearchParams
    from quire.features.lora import LoRARequest
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
    from quire.pooling_params import PoolingParams
    from quire.sampling_params import SamplingParams, StructuredOutputsParams

_HOME = {
    "BeamSearchParams": "quire.engine.loop.beam_search",
    "LLM": "quire.llm",
    "LoRARequest": "quire.features.lora",
    "SamplingParams": "quire.sampling_params",
    "StructuredOutputsParams": "quire.sampling_params",
    "PoolingParams": "quire.pooling_params",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "EmbeddingRequestOutput": "quire.outputs",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
