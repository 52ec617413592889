"""The built-in text of `quire quantize`, and the script that makes it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.models import resolve_model_path
from quire.text.tokenizer import Tokenizer
from quire.tools.quantize.calibration import built_in_text, calibration
from tests.repository.test_checks import tool

SCRIPT = tool("make_calibration_text")


def test_packed_data_contains_only_files_of_this_project() -> None:
    packed = SCRIPT.OUT.read_bytes()
    assert len(packed) <= SCRIPT.LIMIT
    parts = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    folders = {Path(part["source"]).parts[0] for part in parts}
    assert folders == {"README.md", "ARCHITECTURE.md", "docs", "src"}
    assert all(part["text"].strip() for part in parts)
    assert built_in_text() == "\n".join(part["text"] for part in parts)
    stories = SCRIPT.known_stories()
    assert parts[-1] == {"source": SCRIPT.STORIES, "text": stories}
    assert 0.2 < len(stories) / len(built_in_text()) < 0.3


def test_the_script_makes_the_same_text_twice() -> None:
    first = list(SCRIPT.records())
    assert first == list(SCRIPT.records())
    assert len({part["source"] for part in first}) == len(first)


def test_documents_without_figures() -> None:
    document = (
        "# Title\n\n<!-- cases:begin -->\n| model | tok/s |\n<!-- cases:end -->\n"
        "![A plot](images/plot.png)\n\n| option | meaning |\n| --- | --- |\n"
        "| `--seed` | fixes what is drawn |\n| 12.5 | 1,024 × 3 |\nThe end.\n"
    )
    assert SCRIPT.prose(document) == (
        "# Title\n\n| option | meaning |\n| `--seed` | fixes what is drawn |\nThe end.\n"
    )


def test_docstrings_in_their_order() -> None:
    code = (
        '"""Module."""\n\nclass A:\n    """Class."""\n\n    def f(self):\n'
        '        """First line.\n\n        More."""\n\ndef g():\n    return 1\n'
    )
    assert SCRIPT.docstrings(code) == "Module.\n\nClass.\n\nFirst line.\n\nMore.\n\n"


def test_sequences_of_the_built_in_text() -> None:
    tokenizer = Tokenizer.from_path(resolve_model_path(None))
    text = calibration(tokenizer, None, 128, 512, tokenizer.vocab_size)
    assert text.sequences.shape == (128, 512)
    assert text.held_out.shape == (18, 512)
    # With fewer sequences, an equal number is left for measuring.
    fewer = calibration(tokenizer, None, 32, 512, tokenizer.vocab_size)
    assert fewer.sequences.shape == (32, 512)
    assert torch.equal(fewer.held_out, text.held_out)
    with pytest.raises(ConfigError, match="two sequences of"):
        calibration(tokenizer, None, 1, 1_000_000, tokenizer.vocab_size)
