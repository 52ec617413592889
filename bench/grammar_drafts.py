"""Counts the steps of answers under grammars, with and without drafts of the device.

    python bench/grammar_drafts.py [--out bench/results/grammar_drafts.jsonl]

Runs the embedded model, its draft model and its EAGLE-3 head on a CPU, greedily, one request at a
time, with three drafts a row at any cost. Texts must be equal. The number of steps does not depend
on the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.features.speculation.verifier import Verifier
from quire.tools.bench.record import make_record
from tables import print_and_append

ASKED = (
    "Tell me a story about a little fox.",
    "Tell me a story about a cat.",
    "Who are you?",
    "Name three fruits.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "story": {"type": "string", "maxLength": 400},
    },
    "required": ["title", "story"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS: dict[str, dict[str, str] | None] = {
    "none": None,
    "regex": {"regex": r"[A-Za-z ,.!?'\n]{1,200}"},
    "schema": {"json": json.dumps(SCHEMA)},
}
SOURCES = "plain", "draft", "eagle3"
TOKENS, DRAFTS = 60, 3


def counts(llm: LLM) -> tuple[int, int, int]:
    """Returns the steps, and the drafts that were verified and accepted, since the start."""
    stats = llm.stats()
    sources = stats.speculation.sources.values() if stats.speculation else ()
    drafted, accepted = (sum(getattr(s, name) for s in sources) for name in ("drafted", "accepted"))
    return stats.steps, drafted, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    Verifier.seconds = lambda hook, program, graphs: {}  # type: ignore[method-assign]
    metrics: dict[str, float] = {}
    texts: dict[str, list[str]] = {}
    for source in SOURCES:
        settings: dict[str, Any] = {}
        if source != "plain":
            settings["speculative"] = {"method": source, "num_speculative_tokens": DRAFTS}
        llm = LLM(device="cpu", num_kv_blocks=300, max_model_len=256, max_num_seqs=1, **settings)
        for name, grammar in GRAMMARS.items():
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, structured_outputs=grammar)
            messages = [[{"role": "user", "content": asked}] for asked in ASKED]
            before = counts(llm)
            found = llm.chat(messages, params, use_tqdm=False)
            steps, drafted, accepted = (b - a for a, b in zip(before, counts(llm), strict=True))
            answers = [output.outputs[0] for output in found]
            if texts.setdefault(name, [a.text for a in answers]) != [a.text for a in answers]:
                raise SystemExit(f"{source} has changed a text ({name})")
            tokens = sum(len(answer.token_ids) for answer in answers)
            metrics[f"{name}_{source}_tokens_per_step"] = tokens / steps
            metrics[f"{name}_{source}_accepted_share"] = accepted / drafted if drafted else 0.0
        llm.shutdown()
    settings = {"tokens": TOKENS, "drafts": DRAFTS, "requests": len(ASKED)}
    record = make_record("grammar_drafts", metrics, model="quire-tiny", settings=settings)
    print_and_append([record], args.out)


if __name__ == "__main__":
    main()
