"""The report on a quantized model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.tools.quantize.recipe import Recipe

FILES = ("quantization_report.json", "quantization_report.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Difference between a quantized model and its original.

    Attributes:
        model: the model's name.
        recipe: how it was quantized.
        errors: each module's error. It is the norm of the change of its outputs, divided by the
            norm of its outputs.
        plain: the modules that stay in 16 bits.
        tokens: number of held-out tokens that were scored.
        perplexity_before: the original's perplexity over those tokens.
        perplexity_after: the quantized model's perplexity over those tokens.
        kl: the quantized model's mean divergence from the original, in nats.
        bytes_before: size of the original's weights.
        bytes_after: size of the quantized weights.
        gate: the largest increase of perplexity, in percent, that passes.
    """

    model: str
    recipe: Recipe
    errors: dict[str, float]
    plain: list[str]
    tokens: int
    perplexity_before: float
    perplexity_after: float
    kl: float
    bytes_before: int
    bytes_after: int
    gate: float

    @property
    def change(self) -> float:
        """The increase of perplexity in percent."""
        return 100 * (self.perplexity_after / self.perplexity_before - 1)

    @property
    def passes(self) -> bool:
        # A NaN does not pass.
        return self.change <= self.gate

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return {
            "model": self.model,
            "recipe": self.recipe.as_dict(),
            "perplexity": {
                "tokens": self.tokens,
                "before": self.perplexity_before,
                "after": self.perplexity_after,
                "change_percent": self.change,
                "kl": self.kl,
                "gate_percent": self.gate,
                "passes": self.passes,
            },
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "layer_errors": self.errors,
            "unquantized": self.plain,
        }

    def write(self, folder: Path) -> None:
        """Writes the report as JSON and as Markdown."""
        (folder / FILES[0]).write_text(json.dumps(self.as_dict(), indent=2) + "\n", "utf-8")
        (folder / FILES[1]).write_text(self.markdown(), "utf-8")

    def markdown(self) -> str:
        """Returns the report as Markdown."""
        grid = self.recipe.grid
        size = f"groups of {grid.group}" if grid.group else "a scale for each output"
        if grid.outputs > 1:
            size = f"blocks of {grid.outputs} x {grid.group}"
        kind = "8-bit floats" if grid.float else f"integers of {grid.bits} bits"
        passes = "passes" if self.passes else "does not pass"
        lines = [
            f"# {self.model}, quantized",
            "",
            f"Method {self.recipe.method}: {kind}, {size}, "
            f"{'symmetric' if grid.symmetric else 'with zeros'}; inputs: {self.recipe.inputs}.",
            "",
            "| | before | after | |",
            "| --- | ---: | ---: | ---: |",
            f"| perplexity, {self.tokens} tokens held out | {self.perplexity_before:.4f} | "
            f"{self.perplexity_after:.4f} | {self.change:+.2f} % |",
            f"| KL to the original, nats | | {self.kl:.6f} | |",
            f"| bytes of weights | {self.bytes_before} | {self.bytes_after} | "
            f"{100 * self.bytes_after / self.bytes_before:.0f} % |",
            "",
            f"The gate, {self.gate:g} % more perplexity at most, it {passes}.",
            "",
            f"Left in 16 bits: {', '.join(self.plain) or 'no linear layer'}.",
            "",
            "| layer | change of its outputs |",
            "| --- | ---: |",
            *(f"| {name} | {100 * error:.2f} % |" for name, error in self.errors.items()),
        ]
        return "\n".join(lines) + "\n"
