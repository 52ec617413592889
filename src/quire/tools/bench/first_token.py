"""The process that `quire bench startup` measures: an engine that computes one token and ends.

    python -m quire.tools.bench.first_token '{"model": "...", ...}'

The argument holds fields of `EngineArgs`. The last line on standard output is a JSON object of
moments (seconds of `time.monotonic`, one clock for all processes of a machine) and durations.
"""

from __future__ import annotations

import time

_STARTED = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402


def main() -> int:
    fields: dict[str, Any] = json.loads(sys.argv[1])
    # Imported here because the time of these imports is measured.
    from quire import LLM, SamplingParams
    from quire.errors import QuireError

    imported = time.monotonic()
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    settings: Any = {**fields, **lists}
    try:
        llm = LLM(**settings)
    except QuireError as error:
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201
        return 2
    built = time.monotonic()
    prompt = [1 + i % (llm.config.vocab_size - 1) for i in range(16)]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    moments = {
        "started": _STARTED,
        "imported": imported,
        "built": built,
        "first_token": time.monotonic(),
        "seconds": dict(llm._core.capacity.seconds),
        "device": llm.config.device,
    }
    print(json.dumps(moments), flush=True)  # noqa: T201
    llm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
