"""Measurements out of `bench/results`, for the budget's tables."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import Shape

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import DTYPE, PLAIN, RESULTS, dtype_of

_ROWS = {"b1": 1, "b64": 64}
_KERNELS = {
    "residual + RMSNorm": "norm",
    "SiLU·mul": "SiLU·mul",
    "q/k norm + RoPE + KV store": "rope + store",
    "RoPE + KV store": "rope + store",
}


@dataclass(frozen=True)
class Measured:
    """The latest measurements.

    Attributes:
        cases: tok/s or ms by (model, case or TTFT length).
        kernels: µs by (model, kernel, case).
        gemms: µs by a linear layer's key.
    """

    cases: dict[tuple[str, str], float]
    kernels: dict[tuple[str, str, str], float]
    gemms: dict[str, float]

    def case(self, model: str, case: str, size: int) -> float | None:
        model = model.lower()
        if case == "TTFT":
            return self.cases.get((model, f"TTFT {size}"))
        shorter = self.cases.get((model, "b1-256")) if (case, size) == ("b1", 256) else None
        return shorter or self.cases.get((model, case))

    def kernel(self, shape: Shape, kernel: str, case: str, size: int) -> float | None:
        """µs of one call. The norm of few rows is part of the linear layers that follow it."""
        rows = _ROWS.get(case, size)
        if kernel.startswith("linear: "):
            return self._linear(shape, kernel.removeprefix("linear: "), rows)
        if kernel.startswith("attention"):
            kind = "decode" if case in _ROWS else "prefill"
            if "combine" in kernel:
                return None  # timed together with the attention it ends
            label = case if case in _ROWS else str(size)
            return self.kernels.get((shape.name, f"attention {kind}", label))
        return self.kernels.get((shape.name, _KERNELS.get(kernel, kernel), str(rows)))

    def _linear(self, shape: Shape, name: str, rows: int) -> float | None:
        if name == "LM head":
            n, k = shape.vocab, shape.hidden
        else:
            n, k = shape.projections[name]
        gated = name == "gate_up"
        key = f"bfloat16/m{rows}/n{n // 2 if gated else n}/k{k}"
        key += ("/norm" if name in ("qkv", "gate_up") else "") + ("/gated" if gated else "")
        return self.gemms.get(key)


def load() -> Measured:
    """Returns the latest measurements; empty without results."""
    cases: dict[tuple[str, str], float] = {}
    for record in _lines(RESULTS / "h200_throughput.jsonl"):
        model, metrics = record["model"].lower(), record["metrics"]
        settings = record["settings"]
        if dtype_of(model, settings) != DTYPE or not set(settings) <= PLAIN:
            continue
        if "output_tok_s" in metrics:
            cases[model, record["case"]] = metrics["output_tok_s"]
        for name, value in metrics.items():
            if name.startswith("ttft_"):
                cases[model, f"TTFT {name.split('_')[1]}"] = value
    kernels = {
        (row["model"], row["kernel"], row["case"]): min(us for _, us in row["trials"])
        for row in _json(RESULTS / "h200_kernels.json").get("rows", [])
    }
    return Measured(cases, kernels, _json(RESULTS / "h200_gemm.json").get("us", {}))


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
