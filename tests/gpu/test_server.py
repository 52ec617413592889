"""A real server process on the GPU, with a real model's shape."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.test_first_light import QWEN3_06B
from tests.server.server_process import MODEL, start_server


def test_qwen3_shape_streams_over_http(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    server = start_server(
        *("--device", "cuda", "--load-format", "dummy", "--skip-tokenizer-init"),
        # A prompt from the cache is computed in other steps, which round differently.
        *("--kv-cache-gb", "4", "--max-model-len", "4096", "--no-enable-prefix-caching"),
        str(tmp_path),
    )
    try:
        client = server.client()
        prompt = list(range(100, 228))
        options = {"ignore_eos": True, "return_token_ids": True}
        whole = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=32, temperature=0.0, extra_body=options
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 32
        stream = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=32,
            temperature=0.0,
            stream=True,
            extra_body=options,
        )
        chunks = [token for chunk in stream for token in chunk.choices[0].token_ids]  # type: ignore[attr-defined]
        assert chunks == whole.choices[0].token_ids  # type: ignore[attr-defined]
    finally:
        assert server.stop() == 0
