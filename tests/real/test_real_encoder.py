"""all-MiniLM-L6-v2 gives the vectors of sentence-transformers. `make real` fetches it."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from quire import LLM
from tests.real.prepare import MINILM, VECTORS

pytestmark = pytest.mark.real


def test_vectors_are_those_of_sentence_transformers() -> None:
    if not (MINILM.folder / "model.safetensors").is_file():
        message = "the model is not there: `make real` fetches it"
        if os.environ.get("QUIRE_TESTS_REAL"):
            pytest.fail(message)
        pytest.skip(message)
    expected = json.loads(VECTORS.read_text("utf-8"))
    llm = LLM(str(MINILM.folder), device="cpu", max_num_seqs=16)
    found = [output.outputs.embedding for output in llm.embed(expected["texts"], use_tqdm=False)]
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    first = np.array(found)[:, : len(expected["vectors"][0])]
    np.testing.assert_allclose(first, expected["vectors"], atol=1e-5, rtol=0)
