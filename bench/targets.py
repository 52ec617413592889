"""Targets of Quire on one NVIDIA H200 with bf16 weights, and the bound of the hardware.

floor: bytes and FLOPs of the case over the card's ceilings (4.25 TB/s, 700 TFLOP/s).
"""

from __future__ import annotations

from dataclasses import dataclass

CARD = "NVIDIA H200"


@dataclass(frozen=True)
class Target:
    """One figure of one model.

    Attributes:
        reach: in the metric's unit. None means `share` of the model's figure in `share_of`.
        floor: bound of the hardware, in the metric's unit.
    """

    model: str
    label: str
    case: str
    metric: str
    reach: float | None
    floor: float | None = None
    share: float = 1.0
    share_of: str = ""

    @property
    def higher(self) -> bool:
        """Whether more is better."""
        return self.metric.endswith("tok_s")

    @property
    def unit(self) -> str:
        return "tok/s" if self.higher else self.metric.rpartition("_")[2]

    def ratio(self, figure: float, other: float) -> float:
        """Returns how many times as good `figure` is as `other`."""
        return figure / other if self.higher else other / figure


def _rate(model: str, case: str, reach: float, floor: float | None = None) -> Target:
    label = "b1 (256 out)" if case == "b1-256" else case
    return Target(model, label, case, "output_tok_s", reach, floor)


def _ttft(model: str, reach: tuple[float, ...], floor: tuple[float, ...]) -> list[Target]:
    sizes = (512, 2048, 8192)
    return [
        Target(model, f"TTFT {size}", "ttft", f"ttft_{size}_ms", limit, bound)
        for size, limit, bound in zip(sizes, reach, floor, strict=False)
    ]


def _start(model: str) -> Target:
    return Target(model, "command to first token", "startup", "first_token_s", 12, 6)


TARGETS: tuple[Target, ...] = (
    _rate("Qwen3-0.6B", "nano", 26_500, 33_000),
    Target(
        "Qwen3-0.6B",
        "nano-penalized",
        "nano-penalized",
        "output_tok_s",
        reach=None,
        share=0.95,
        share_of="nano",
    ),
    _rate("Qwen3-0.6B", "b64", 25_000, 39_000),
    _rate("Qwen3-0.6B", "b1", 1900, 3570),
    *_ttft("Qwen3-0.6B", (3, 7, 26), (1, 4, 20)),
    _start("Qwen3-0.6B"),
    _rate("Qwen2.5-1.5B", "nano", 40_000, 48_000),
    _rate("Qwen2.5-1.5B", "b64", 30_000, 41_000),
    _rate("Qwen2.5-1.5B", "b1", 1050, 1377),
    *_ttft("Qwen2.5-1.5B", (4.5, 12, 46), (2.3, 9.5, 45)),
    _rate("Qwen2.5-1.5B", "64x64x16", 1.8 * 9112),
    _rate("Qwen2.5-1.5B", "64x64x1024", 1.35 * 21_105),
    _rate("Qwen2.5-1.5B", "64x512x1024", 1.2 * 20_660),
    _rate("Qwen2.5-1.5B", "16x8192x128", 2000),
    _start("Qwen2.5-1.5B"),
    _rate("Qwen3-8B", "nano", 10_500, 12_000),
    _rate("Qwen3-8B", "b64", 6800, 8000),
    _rate("Qwen3-8B", "b1-256", 258, 281),
    *_ttft("Qwen3-8B", (14, 50, 208), (12, 48, 205)),
    _start("Qwen3-8B"),
    _rate("Llama-2-7B", "b64", 5200, 6060),
    _rate("Llama-2-7B", "b1-256", 290, 321),
    _start("Llama-2-7B"),
)


def reach(model: str, case: str, metric: str = "output_tok_s") -> float:
    """Returns the figure to reach. Raises KeyError if it is not a fixed one."""
    fixed = {(t.model, t.case, t.metric): t.reach for t in TARGETS if t.reach is not None}
    return fixed[model, case, metric]
