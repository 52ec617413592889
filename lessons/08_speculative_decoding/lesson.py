"""Tests two ways to accept drafts, then predicts what the engine's speculation gains.

    python -m lessons 8 [--mine FILE]
    python -m lessons 8 --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B

A model without --draft is drafted for by the first half of its layers.

1. Ratio test: a toy draft and a toy target, and a chi-square test of what comes out.
2. Shared noise: the same with one noise for both. Nothing of the draft's distribution is kept.
3. Your engine, which does the second: its texts with and without drafts, and its passes counted.
4. Quire, which measures at its start how many drafts pay on this machine.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lessons import mine, plots
from lessons.common import Loaded, check, half, load, own_model, parser, table
from quire import LLM, SamplingParams
from quire.models import resolve_model_path

toys = importlib.import_module("lessons.08_speculative_decoding.toys")
PROMPTS = ("Once upon a time", "The little dog", "One day, a girl", "Tom and his friend")


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Returns the tokens of a pass that verifies so many drafts: 1 + a + a^2 + ... + a^drafts."""
    return sum(acceptance**place for place in range(drafts + 1))


def toy() -> None:
    """Checks both tests against the target's distribution."""
    distance = float((toys.TARGET - toys.DRAFT).abs().sum() / 2)
    rows = []
    for test in (toys.ratio_test, toys.shared_noise):
        tokens, kept = test(toys.TARGET, toys.DRAFT, torch.Generator().manual_seed(0))
        p = [toys.chi_square(each, toys.TARGET) for each in (tokens, tokens[kept])]
        rows.append([test.__name__, float(kept.float().mean()), *p])
    print(table(["test", "accepted", "p of the tokens", "p of the kept alone"], rows))
    for name, _, p_of_all, p_of_kept in rows:
        check(p_of_all > 0.01, f"{name}: tokens are the target's (chi-square p = {p_of_all:.2f})")
        check(p_of_kept < 1e-6, f"{name}: kept drafts alone are not")
    ratio, shared, least = rows[0][1], rows[1][1], (1 - distance) / (1 + distance)
    check(abs(ratio - (1 - distance)) < 0.01, f"ratio test: 1 - TV = {1 - distance:.3f}")
    check(shared > least - 0.01, f"shared noise: at least (1 - TV) / (1 + TV) = {least:.3f}\n")


def prompts(model: Loaded) -> list[list[int]]:
    return [model.tokenizer.encode(text).tolist() for text in PROMPTS]


def run(model: Loaded, draft: mine.Model, drafts: int, length: int) -> tuple[list[list[int]], Any]:
    """Completes the prompts on the reader's engine. Returns their tokens, and the engine."""
    own = own_model(model)
    engine = mine.DraftEngine(own, mine.PagedCache(own, count=64), draft, drafts)
    requests = [
        mine.Request(str(seed), ids, len(ids) + length, mine.Sample(seed, 0.7))
        for seed, ids in enumerate(prompts(model))
    ]
    for request in requests:
        engine.add(request)
    engine.run()
    return [request.tokens[-length:] for request in requests], engine


def predict(
    model: Loaded, draft: Path, counts: Sequence[int], length: int, plot: Path | None
) -> None:
    """Predicts the passes of each draft count from the acceptance of single drafts."""
    drafter = mine.Model(draft)
    plain, _ = run(model, drafter, 0, length)
    single, one = run(model, drafter, 1, length)
    acceptance, rows, same = one.accepted / one.drafted, [], [single == plain]
    for count in counts:
        tokens, engine = run(model, drafter, count, length)
        same.append(tokens == plain)
        total = sum(map(len, tokens))
        rows.append(
            [count, total, engine.passes, total / engine.passes, expected_tokens(acceptance, count)]
        )
    print(f"of single drafts {acceptance:.1%} were accepted")
    print(table(["drafts", "tokens", "passes", "tokens a pass", "predicted"], rows))
    check(all(same), "with 1 draft and with more, the same seeds give the same texts")
    for count, _, _, measured, predicted in rows:
        error = abs(predicted / measured - 1)
        check(error < 0.1, f"{count} drafts: tokens a pass are predicted within {error:.1%}")
    series = {"measured": [row[3] for row in rows], "predicted": [row[4] for row in rows]}
    plots.lines(plot, counts, series, ("drafts a pass", "tokens a pass"))


def shipped(model: Loaded, draft: Path, length: int) -> None:
    """Writes the same prompts on the shipped engine, which decides how many drafts pay."""
    found, shown = [], list[list[Any]]()
    for settings in (None, {"method": "draft", "model": str(draft), "num_speculative_tokens": 4}):
        llm = LLM(
            str(model.path), max_model_len=256, max_num_seqs=len(PROMPTS), kv_cache_gb=0.25,
            speculative=settings,
            deterministic=torch.cuda.is_available(),  # elsewhere texts are equal anyway
        )  # fmt: skip
        params = [
            SamplingParams(temperature=0.7, max_tokens=length, seed=seed, ignore_eos=True)
            for seed in range(len(PROMPTS))
        ]
        outputs = llm.generate(prompts(model), params, use_tqdm=False)
        stats = llm.stats().speculation
        counts = stats.sources["draft"] if stats is not None and stats.sources else None
        llm.shutdown()
        found.append([output.outputs[0].token_ids for output in outputs])
        name = "drafts, as far as they pay" if settings else "no drafts"
        shown.append([name, counts.drafted if counts else 0, counts.accepted if counts else 0])
    print("\n" + table(["Quire", "drafts verified", "accepted"], shown))
    check(found[0] == found[1], "Quire too writes the same texts, whatever it decides")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--draft", help="a draft model of the same vocabulary")
    options.add_argument("--counts", type=int, nargs="+", default=[2, 4], help="drafts a pass")
    options.add_argument("--length", type=int, default=40, help="tokens of a text")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model = load(args)
    toy()
    with tempfile.TemporaryDirectory() as folder:
        embedded = model.path.with_name("quire-tiny-draft")
        made = half(model, Path(folder)) if args.model and not args.draft else embedded
        draft = resolve_model_path(args.draft) if args.draft else made
        predict(model, draft, args.counts, args.length, args.plot)
        shipped(model, draft, args.length)


if __name__ == "__main__":
    main(sys.argv[1:])
