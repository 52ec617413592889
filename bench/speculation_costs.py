"""Measures how drafts of published pairs of models pay, and holds the cost model against it.

    python bench/speculation_costs.py --out costs.csv --plot costs.svg       # one GPU, a minute
    python bench/speculation_costs.py --small --device cpu                   # anywhere

TinyLlama-1.1B drafts for Llama-2-7B, and GPT-2 for GPT-2 medium. All weights are random. Steps have
their real cost, and drafts are accepted with a given probability a.

The table has three figures for each number of drafts:

measured    tokens per second of one request over those without drafts

predicted   (1 - a^(K+1)) / ((1 - a) (v(K) + c K)) for K drafts

error       the difference in percent

c is the time of one draft and v(K) the time of a step that verifies K drafts. The engine measures
both at its start, in units of a step without drafts.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from quire import LLM, SamplingParams
from quire.features.speculation import feature as feature_module
from quire.features.speculation.draft_count import Choice, StepCosts
from quire.features.speculation.verifier import Verifier
from quire.tools.bench import plots

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 1024,
    "vocab_size": 50257, "torch_dtype": "bfloat16",
}  # fmt: skip


def llama(hidden: int, width: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **LLAMA, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip


def gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {**GPT2, "n_embd": hidden, "n_layer": layers, "n_head": heads}


PAIRS = {
    "tinyllama-1.1b -> llama-2-7b": (
        llama(4096, 11008, 32, 32, 32),
        llama(2048, 5632, 22, 32, 4),
    ),
    "gpt2 -> gpt2-medium": (gpt2(1024, 24, 16), gpt2(768, 12, 12)),
}
SMALL = {"small": (llama(256, 512, 8, 8, 8), llama(128, 256, 2, 4, 4))}
ALPHAS = 0.5, 0.6, 0.7, 0.8, 0.9


def run(llm: LLM, drafts: int, length: int) -> float:
    """Returns tokens per second of one request, with so many drafts in every step."""

    def choose(costs: StepCosts, chance: Any, modelled: Any, room: Any) -> Choice:
        return Choice(np.minimum(room, drafts))

    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    with (
        patch.object(feature_module, "choose", choose),
        patch.object(feature_module, "may_pay", lambda *args: drafts > 0),
    ):
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": [7] * 16}], params, use_tqdm=False)
        return length / (time.perf_counter() - begun)


def predicted(costs: StepCosts, alpha: float, drafts: int) -> float:
    """Returns the gain that the cost model expects for one row."""
    step = costs.decode(1)
    tokens = (1.0 - alpha ** (drafts + 1)) / (1.0 - alpha)
    taken = costs.verify(np.array([1 + drafts]))[0] + costs.draft(1, np.array([drafts]))[0]
    return float(tokens * step / taken)


def measure(name: str, target: Any, draft: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for which, config in (("target", target), ("draft", draft)):
            folder = Path(made, which)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        llm = LLM(
            str(Path(made, "target")), device=args.device, load_format="dummy", max_num_seqs=1,
            max_model_len=1024, skip_tokenizer_init=True, enable_prefix_caching=False,
            speculative={
                "method": "draft", "model": str(Path(made, "draft")),
                "num_speculative_tokens": max(args.drafts), "simulate_acceptance": ALPHAS[0],
            },
        )  # fmt: skip
        core = llm._core
        (hook,) = [h for h in core._executor._features if isinstance(h, Verifier)]  # type: ignore[attr-defined]
        costs = StepCosts(core.capacity.step_seconds)
        run(llm, max(args.drafts), 32)
        plain = max(run(llm, 0, args.length) for _ in range(2))
        for alpha in ALPHAS:
            hook.simulate(alpha)
            for drafts in args.drafts:
                gain = run(llm, drafts, args.length) / plain
                expected = predicted(costs, alpha, drafts)
                lines.append(
                    {
                        "pair": name, "acceptance": alpha, "drafts": drafts,
                        "plain_tok_s": round(plain, 1), "measured": round(gain, 3),
                        "predicted": round(expected, 3),
                        "error_percent": round(100.0 * (expected / gain - 1.0), 1),
                    }
                )  # fmt: skip
                print(*lines[-1].values(), sep="\t", file=sys.stderr, flush=True)
        llm.shutdown()
    return lines


def plot(lines: list[dict[str, Any]], out: Path) -> None:
    """Draws gain over drafts, a line for each acceptance, points where it was measured."""
    from matplotlib.figure import Figure

    pairs = list(dict.fromkeys(line["pair"] for line in lines))
    figure = Figure(figsize=(5.5 * len(pairs), 4), layout="constrained")
    panels = figure.subplots(1, len(pairs), squeeze=False)[0]
    for panel, pair in zip(panels, pairs, strict=True):
        for alpha, color in zip(ALPHAS, plots.COLORS, strict=False):
            own = [x for x in lines if x["pair"] == pair and float(x["acceptance"]) == alpha]
            places = [int(x["drafts"]) for x in own]
            predicted = [float(x["predicted"]) for x in own]
            panel.plot(places, predicted, label=f"accepted {alpha:.0%}", color=color)
            panel.plot(places, [float(x["measured"]) for x in own], "o", color=color)
        panel.axhline(1, color="#7d8590", linewidth=0.8)
        panel.set_title(f"{pair}: lines by the formula, points measured", fontsize="medium")
        panel.set_xlabel("drafts of a row")
        panel.set_ylabel("speed, without drafts = 1")
        plots.label_lines(panel)
    plots.save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try this anywhere")
    parser.add_argument("--length", type=int, default=128, help="tokens of a run")
    parser.add_argument(
        "--drafts", type=lambda x: [int(n) for n in x.split(",")], default=list(range(1, 9))
    )
    parser.add_argument("--out", type=Path, help="write the table to this CSV file")
    parser.add_argument("--plot", type=Path, help="draw it, with matplotlib")
    args = parser.parse_args()
    pairs = SMALL if args.small else PAIRS
    lines = [line for name, pair in pairs.items() for line in measure(name, *pair, args)]
    columns = list(lines[0])
    writer = csv.DictWriter(sys.stdout, columns, delimiter="\t")
    writer.writeheader()
    writer.writerows(lines)
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            whole = csv.DictWriter(file, columns)
            whole.writeheader()
            whole.writerows(lines)
    if args.plot is not None:
        plot(lines, args.plot)


if __name__ == "__main__":
    main()
