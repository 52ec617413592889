"""Shapes of the models that the kernel bench and the time budget use."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A dense decoder's sizes; weights and KV in bf16."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool = False
    bias: bool = False

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Linear layers of one decoder layer as (out features N, in features K)."""
        return {
            "qkv": (self.qkv_width, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 4 * self.kv_heads * self.head_dim


QWEN3_0_6B = Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True)
QWEN25_1_5B = Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, bias=True)
QWEN3_8B = Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True)
LLAMA2_7B = Shape("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000)

QWEN3_32B = Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True)

MODELS = (QWEN3_0_6B, QWEN25_1_5B, QWEN3_8B, LLAMA2_7B)
LARGE = (QWEN3_32B,)
"""Models that are only measured when they are asked for."""
UNTUNED = (
    Shape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256),
    Shape("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256),
    Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, qk_norm=True),
    Shape("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32768),
    Shape("Phi-3-mini", 32, 3072, 32, 32, 96, 8192, 32064),
    Shape("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, qk_norm=True),
    Shape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, qk_norm=True),
    Shape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, bias=True),
    Shape("SmolLM2-1.7B", 24, 2048, 32, 32, 64, 8192, 49152),
    Shape("Gemma-2-2B", 26, 2304, 8, 4, 256, 9216, 256000),
    Shape("Phi-4", 40, 5120, 40, 10, 128, 17920, 100352),
    QWEN3_32B,
)
"""Models for whose shapes no 16-bit plans are shipped."""


def part_of(model: Shape, ranks: int) -> Shape:
    """Returns the sizes of a rank's part of a model."""
    return replace(
        model, heads=model.heads // ranks, kv_heads=max(1, model.kv_heads // ranks),
        intermediate=model.intermediate // ranks, vocab=-(-model.vocab // ranks),
    )  # fmt: skip
