"""Autoregressive generation: a Qwen3 in plain PyTorch, one token at a time.

Run it from the repository's root: python -m lessons 1 [--mine FILE] [--model Qwen/Qwen3-0.6B]
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from lessons import mine
from lessons.common import check, load, own_model, parser, table
from quire import LLM, SamplingParams


class Timed:
    """A model that notes how many positions each call computes, and its time."""

    def __init__(self, model: mine.Model) -> None:
        self.model, self.logits = model, model.logits
        self.rows: list[tuple[int, int, float]] = []

    def forward(self, ids: Tensor, positions: Tensor, memory: Any) -> Tensor:
        began = time.perf_counter()
        x = self.model.forward(ids, positions, memory)
        self.rows.append((len(self.rows) + 1, len(ids), 1e3 * (time.perf_counter() - began)))
        return x


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    args = options.parse_args(arguments)
    loaded = load(args)
    model: Any = Timed(own_model(loaded))
    prompt = loaded.tokenizer.encode("Once upon a time").tolist()
    ours = mine.generate(model, prompt, args.tokens, mine.greedy)
    rows = list(model.rows)
    print("greedy:", repr(loaded.tokenizer.hub.decode(ours)))
    for seed in (1, 2):
        found = mine.generate(model, prompt, args.tokens // 4, mine.Sample(seed))
        again = mine.generate(model, prompt, args.tokens // 4, mine.Sample(seed))
        print(f"seed {seed}:", repr(loaded.tokenizer.hub.decode(found)))
        check(found == again, f"seed {seed} gives the same text again")
    print("\n" + table(["token", "positions computed", "ms"], rows[:: max(1, len(rows) // 8)]))
    computed, new = sum(row[1] for row in rows), len(prompt) + args.tokens - 1
    check(computed > 2 * new, f"{computed:,} positions computed, {new} of them for the first time")

    llm = LLM(str(loaded.path), device="cpu", max_model_len=1024, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()
    equal = sum(a == b for a, b in zip(ours, output.outputs[0].token_ids, strict=True))
    check(equal == args.tokens, f"{equal} of {args.tokens} greedy tokens are the engine's")


if __name__ == "__main__":
    main()
