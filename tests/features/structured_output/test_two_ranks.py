"""Two ranks read the masks of the same memory, the second one as late as it may."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.runner.hooks import mask
from tests.features.structured_output.test_engine import structured

_LATER = 0.01
"""Seconds after which the second rank reads a step's masks."""
# Masks that differ from step to step, and then a choice that shows what the ranks have computed.
REGEXES = "([A-M][n-z]){3}[a-z ]{20}", "[0-4][5-9][a-z ]{9}", "[x-z]{4}[0-9][a-z ]{9}"
PARAMS = [
    SamplingParams(structured_outputs=structured(regex=regex), temperature=0.0, max_tokens=20)
    for regex in REGEXES
]


def later_verdicts(patch: pytest.MonkeyPatch) -> None:
    """Lets the first rank go on before the second one sees its verdicts.

    By then the masks of the next step are built.
    """
    wait = mask._wait_for_inputs

    def go_on(rows: Any, logit_rows: Any, gate: Any, inputs: Any, **more: Any) -> None:
        own = inputs._replace(verdicts=inputs.verdicts.clone())
        wait(rows, logit_rows, gate, own, **more)
        changed = own.verdicts > inputs.verdicts

        def publish() -> None:
            inputs.verdicts[changed] = own.verdicts[changed]

        threading.Timer(_LATER, publish).start()

    patch.setattr(mask, "_wait_for_inputs", go_on)


def tokens(llm: LLM) -> list[list[int]]:
    # More requests than lanes, so that lanes change hands.
    found = llm.generate(["Once upon a time"] * 3, PARAMS, use_tqdm=False)
    return [each.outputs[0].token_ids for each in found]


def test_the_second_rank_reads_masks_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of the next step do not overwrite those that it still reads."""
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 64,
        "num_kv_blocks": 40, "steps_in_flight": 2,
    }  # fmt: skip
    one = LLM(**settings)
    expected = tokens(one)
    one.shutdown()
    two = LLM(**settings, tensor_parallel_size=2)
    later_verdicts(monkeypatch)
    assert tokens(two) == expected
    two.shutdown()
