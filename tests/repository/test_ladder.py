"""The ladder: every rung gives the same tokens, and its baselines are Quire's models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.tools.bench.record import make_record, read_jsonl
from tests.tiny_engine import model_folder

sys.path.append(str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "bench" / "baselines"))
from crossover import crossover

import ladder

GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_norm_epsilon": 1e-5,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "vocab_size": 211,
}
QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 211,
}
SMALL = ["--requests", "5", "--slots", "2", "--own", "3-9", "--length", "3-7", "--budget", "16"]


@pytest.mark.parametrize("config", [GPT2, QWEN2], ids=["gpt2", "qwen2"])
def test_every_rung_gives_the_same_tokens(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = model_folder(tmp_path / "model", config), tmp_path / "records.jsonl"
    # Exact rungs end the run where a token differs.
    ladder.main([str(folder), *SMALL, "--out", str(out), "--span", "0"])
    records = read_jsonl(out)
    names = [record.case.partition(":")[2] for record in records]
    assert names == [rung.name for rung in ladder.rungs(2, 16, None) if not rung.gpu]
    assert "graphs: skipped, needs a GPU" in capsys.readouterr().out
    # Speeds of a CPU say nothing elsewhere.
    assert {name for record in records for name in record.metrics} == {
        "to_naive",
        "to_before",
        "same_texts",
    }


def test_static_batches_wait_for_their_last_request() -> None:
    jobs = ladder.requests(4, 2, (3, 3), (1, 1), 4.0, 100)
    assert [job.arrival for job in jobs] == [0.0, 1.0, 2.0, 3.0]
    assert all(job.prompt[:2] == jobs[0].prompt[:2] and len(job.prompt) == 5 for job in jobs)

    class Counting:
        """Gives token 0 to every row, and counts the rows of each pass."""

        def __init__(self) -> None:
            self.device, self.rows = ladder.torch.device("cpu"), list[int]()

        def cache(self, rows: int, longest: int) -> None:
            self.rows.append(rows)

        def step(self, ids: Any, *rest: Any) -> Any:
            return ladder.torch.zeros(len(ids), dtype=ladder.torch.int64)

    def batches(**options: Any) -> tuple[list[int], list[int]]:
        model, clock = Counting(), ladder.Clock(ladder.torch.device("cpu"))
        own = ladder.requests(4, 2, (3, 3), (1, 1), 4.0, 100)
        ladder.static(model, own, clock, **options)
        return model.rows, [int(job.times[0]) for job in own]

    assert batches(size=3) == ([3, 1], [2, 2, 2, 3])
    assert batches(size=3, window=1.5) == ([2, 2], [1, 1, 3, 3])
    assert batches(size=1) == ([1, 1, 1, 1], [0, 1, 2, 3])


@pytest.mark.parametrize("config", [GPT2, QWEN2], ids=["gpt2", "qwen2"])
def test_padded_steps_give_the_same_tokens(tmp_path: Path, config: dict[str, Any]) -> None:
    """Graphs pad rows and lengths. Without a GPU the padded steps run as they are."""
    args = argparse.Namespace(device="cpu")
    plain = ladder.load_plain(model_folder(tmp_path / "model", config), args)
    padded = ladder.GraphedModel(plain)
    jobs = ladder.requests(5, 2, (3, 9), (3, 7), 0.0, 200)
    runs = [
        ladder.naive,
        ladder.cached,
        lambda *work: ladder.static(*work, size=3),
        lambda *work: ladder.continuous(*work, slots=3),
    ]
    for run in runs:
        outputs = []
        for model in (plain, padded):
            own = ladder.fresh(jobs)
            run(model, own, ladder.Clock(plain.device))
            outputs.append([job.output for job in own])
        assert outputs[0] == outputs[1]


def test_the_table_has_all_rungs_in_their_order() -> None:
    def record(model: str, rung: str, ratio: float) -> ladder.BenchRecord:
        return ladder.BenchRecord(
            case=f"ladder:{rung}", model=model, card="card", metrics={"to_naive": ratio}
        )

    small = [record("a", "naive", 1.0), record("a", "paged", 2.0), record("a", "overlap", 4.0)]
    whole = [record("b", name, 3.0) for name in ("naive", "paged", "graphs", "overlap")]
    text = ladder.ladder_report.rungs([*small, *whole, record("a", "paged", 2.5)])
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == [
        "| naive", "| paged", "| graphs", "| overlap",
    ]  # fmt: skip
    assert "| paged | 2.5 × | 3 × | 15 × " in text
    assert "| graphs | – | 3 × |" in text


def test_the_crossover_is_the_size_from_which_blocks_stay_faster() -> None:
    found = {1: (1.0, 2.0, 9.0, 5.0), 2: (3.0, 2.0, 9.0, 9.5), 4: (5.0, 3.0, 9.0, 8.0),
             8: (9.0, 4.0, 9.0, 10.0), 16: (None, 5.0, None, 11.0)}  # fmt: skip
    names = "contiguous_memory_gb", "quire_memory_gb", "contiguous_tok_s", "quire_tok_s"
    records = [
        make_record(
            f"contiguous-{batch}",
            {n: v for n, v in zip(names, values, strict=True) if v is not None},
        )
        for batch, values in found.items()
    ]
    assert crossover(records).metrics == {"memory_gb_from": 2.0, "tok_s_from": 8.0}
    assert crossover(records[:3]).metrics == {"memory_gb_from": 2.0}


def test_baselines_are_small() -> None:
    for file in Path(ladder.__file__).with_name("baselines").glob("*.py"):
        assert len(file.read_text("utf-8").splitlines()) <= 200
