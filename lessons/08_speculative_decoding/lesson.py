"""Tests two ways to accept drafts, then predicts what the engine's speculation gains.

    python -m lessons.08_speculative_decoding.lesson
    python -m lessons.08_speculative_decoding.lesson --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B

A model without --draft is drafted for by the first half of its layers.

1. Ratio test: a toy draft and a toy target, and a chi-square test of what comes out.
2. Shared noise: the same with one noise for both. Nothing of the draft's distribution is kept.
3. The engine, which does the second: its texts with and without drafts, and its passes counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lessons import plots
from lessons.common import check, half, load, parser, table
from quire import LLM, SamplingParams

DRAWS = 40_000
TARGET = torch.tensor([0.45, 0.25, 0.12, 0.10, 0.05, 0.03])
DRAFT = torch.tensor([0.30, 0.20, 0.30, 0.05, 0.05, 0.10])
PROMPTS = ("Tell me a story about a fox.", "Write a tale about a boat.", "Who is it?", "Hello!")


def ratio_test(target: Tensor, draft: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023: keeps a draft x with probability min(1, p(x) / q(x)), else draws from
    what the target has more of. Returns the tokens int64 [DRAWS], and which drafts were kept."""
    x = torch.multinomial(draft, DRAWS, replacement=True, generator=rng)
    kept = torch.rand(DRAWS, generator=rng) < target[x] / draft[x]
    rest = torch.multinomial((target - draft).clamp(min=0), DRAWS, replacement=True, generator=rng)
    return torch.where(kept, x, rest), kept


def shared_noise(target: Tensor, draft: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws both with the same Gumbel noise, and keeps the draft where they agree. The result is
    the target's own draw, so it has the target's distribution for any draft."""
    noise = -torch.empty(DRAWS, len(target)).exponential_(generator=rng).log()
    drawn = (target.log() + noise).argmax(-1)
    return drawn, (draft.log() + noise).argmax(-1) == drawn


def chi_square(tokens: Tensor, distribution: Tensor) -> float:
    """Returns the probability that draws from the distribution deviate from it by more."""
    expected = distribution * len(tokens)
    found = torch.bincount(tokens, minlength=len(distribution))
    statistic = ((found - expected).square() / expected).sum()
    freedom = torch.tensor((len(distribution) - 1) / 2)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Returns the tokens of a pass that verifies so many drafts: 1 + a + a^2 + ... + a^drafts."""
    return sum(acceptance**place for place in range(drafts + 1))


def toy() -> None:
    """Checks both tests against the target's distribution."""
    distance = float((TARGET - DRAFT).abs().sum() / 2)
    rows, found = [], {}
    for test in (ratio_test, shared_noise):
        tokens, kept = test(TARGET, DRAFT, torch.Generator().manual_seed(0))
        found[test.__name__] = float(kept.float().mean())
        p, p_of_kept = chi_square(tokens, TARGET), chi_square(tokens[kept], TARGET)
        rows.append([test.__name__, found[test.__name__], p, p_of_kept])
        check(p > 0.01, f"{test.__name__}: tokens are the target's (chi-square p = {p:.2f})")
        check(p_of_kept < 1e-6, f"{test.__name__}: kept drafts alone are not")
    print(table(["test", "accepted", "p of the tokens", "p of the kept alone"], rows))
    least = (1 - distance) / (1 + distance)
    check(
        abs(found["ratio_test"] - (1 - distance)) < 0.01, f"ratio test: 1 - TV = {1 - distance:.3f}"
    )
    check(
        found["shared_noise"] > least - 0.01,
        f"shared noise: at least (1 - TV) / (1 + TV) = {least:.3f}",
    )


def run(model: Path, draft: str, drafts: int, length: int) -> tuple[list[list[int]], int, int]:
    """Completes the prompts. Returns their tokens, the drafts verified, and those accepted."""
    speculative = {"method": "draft", "model": draft, "num_speculative_tokens": drafts}
    # The engine drafts as far as its clock says that it pays, which on a CPU is not far. Without
    # measurements a pass costs the same for one token and for eight, as it does on a GPU.
    with mock.patch("quire.features.speculation.verifier.measure_steps", return_value={}):
        llm = LLM(
            str(model), max_model_len=256, max_num_seqs=len(PROMPTS), kv_cache_gb=0.25,
            speculative=speculative if drafts else None,
            deterministic=torch.cuda.is_available(),  # elsewhere texts are equal anyway
        )  # fmt: skip
    params = [
        SamplingParams(temperature=0.7, max_tokens=length, seed=seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.chat(chats, params, use_tqdm=False)
    stats = llm.stats().speculation
    counts = stats.sources["draft"] if stats is not None and stats.sources else None
    llm.shutdown()
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, counts.drafted if counts else 0, counts.accepted if counts else 0


def engine(model: Path, draft: str, counts: Sequence[int], length: int, plot: Path | None) -> None:
    """Predicts the passes of each draft count from the acceptance of single drafts."""
    plain, _, _ = run(model, draft, 0, length)
    single, drafted, accepted = run(model, draft, 1, length)
    acceptance = accepted / drafted
    check(single == plain, "with one draft a pass, the same seeds give the same texts")
    rows = []
    for count in counts:
        tokens, _, accepted = run(model, draft, count, length)
        check(tokens == plain, f"with {count} drafts a pass too")
        total = sum(map(len, plain)) - len(plain)  # the prompt's pass gives the first of each
        measured = total / (total - accepted)  # a pass gives one token, and the drafts it accepts
        predicted = expected_tokens(acceptance, count)
        rows.append([count, total, total - accepted, measured, predicted])
        error = abs(predicted / measured - 1)
        check(error < 0.1, f"{count} drafts: tokens per pass predicted within {error:.1%}")
    series = {"measured": [row[3] for row in rows], "predicted": [row[4] for row in rows]}
    plots.lines(plot, counts, series, ("drafts a pass", "tokens a pass"))
    print(f"\nof single drafts {acceptance:.1%} were accepted")
    print(table(["drafts", "tokens", "target passes", "tokens per pass", "predicted"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--draft", help="a draft model of the same vocabulary")
    options.add_argument("--counts", type=int, nargs="+", default=[4], help="drafts a pass")
    options.add_argument("--length", type=int, default=40, help="tokens of a text")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model = load(args)
    toy()
    with tempfile.TemporaryDirectory() as folder:
        embedded = model.path.with_name("quire-tiny-draft")
        draft = args.draft or str(half(model, Path(folder)) if args.model else embedded)
        engine(model.path, draft, args.counts, args.length, args.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
