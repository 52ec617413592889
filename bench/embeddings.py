"""Compares embeddings of short texts with `sentence-transformers`, in one process.

    python bench/embeddings.py FOLDER [--peer transformers] [--out bench/results/embeddings.jsonl]

A round embeds one text of each stream. Both engines tokenize, compute and return vectors on the
host, in turns, so other work slows both. `--peer transformers` encodes as `sentence-transformers`
does, for machines without that package: sorted by length, padded to the longest text of a batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire import LLM
from quire.tools.bench.record import make_record
from tables import print_and_append

STREAMS = 1, 16, 64, 256
WORDS = "the river old stone over bright quickly a house of seven garden window letters in slowly"

Encode = Callable[[list[str]], Any]


def texts_of(draw: random.Random, count: int) -> list[str]:
    """Returns short texts, of 4 to 40 words."""
    words = WORDS.split()
    return [" ".join(draw.choices(words, k=draw.randint(4, 40))) for _ in range(count)]


def peer_encoder(name: str, folder: str, device: str, dtype: torch.dtype) -> Encode:
    """Returns the function that embeds texts with another program."""
    if name == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(folder, device=device, model_kwargs={"dtype": dtype})
        return lambda texts: model.encode(texts, batch_size=len(texts), show_progress_bar=False)
    return transformers_encoder(folder, device, dtype)


def transformers_encoder(folder: str, device: str, dtype: torch.dtype) -> Encode:
    from tokenizers import Tokenizer
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=dtype).eval().to(device)
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()

    @torch.inference_mode()
    def encode(texts: list[str]) -> Any:
        order = np.argsort([-len(text) for text in texts])
        batch = tokenizer.encode_batch([texts[i] for i in order])
        ids = torch.tensor([each.ids for each in batch]).to(device)
        mask = torch.tensor([each.attention_mask for each in batch]).to(device)
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        wide = mask.unsqueeze(-1).to(states.dtype)
        pooled = (states * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
        vectors = torch.nn.functional.normalize(pooled, dim=1).float().cpu().numpy()
        return vectors[np.argsort(order)]

    return encode


def vectors_of(found: Any) -> Any:
    """Returns an engine's vectors as one array."""
    if isinstance(found, list):
        return np.array([output.outputs.embedding for output in found])
    return found


def round_seconds(encode: Encode, texts: list[str]) -> float:
    began = time.perf_counter()
    encode(texts)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument(
        "--peer",
        choices=("sentence-transformers", "transformers"),
        default="sentence-transformers",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="for each engine and stream count"
    )
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    llm = LLM(args.folder, dtype=args.dtype)
    dtype = getattr(torch, llm.config.dtype)
    encoders: dict[str, Encode] = {
        "quire": lambda texts: llm.embed(texts, use_tqdm=False),
        args.peer: peer_encoder(args.peer, args.folder, device, dtype),
    }
    tokenizer = llm.get_tokenizer()
    sample = texts_of(random.Random(0), 64)
    own, other = (vectors_of(encode(sample)) for encode in encoders.values())
    agreement = float((own * other).sum(axis=1).min())
    for streams in args.streams:
        draw = random.Random(streams)
        times: dict[str, list[float]] = {name: [] for name in encoders}
        tokens = 0
        for encode in encoders.values():
            for _ in range(3):
                encode(texts_of(draw, streams))
        while sum(map(sum, times.values())) < 2 * args.seconds:
            texts = texts_of(draw, streams)
            tokens += sum(len(tokenizer.encode(text)) for text in texts)
            for name, encode in encoders.items():
                times[name].append(round_seconds(encode, texts))
        records = []
        for name, seconds in times.items():
            metrics = {
                "tokens_s": tokens / sum(seconds),
                "texts_s": streams * len(seconds) / sum(seconds),
                "p50_ms": 1e3 * statistics.median(seconds),
                "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
                "times_peer": sum(times[args.peer]) / sum(times[name]),
                "least_cosine": agreement,
            }
            settings = {"streams": streams, "engine": name, "dtype": llm.config.dtype}
            case = f"embeddings_{name}_{streams}"
            records.append(
                make_record(case, metrics, model=Path(args.folder).name, device=device,
                            settings=settings)
            )  # fmt: skip
        print_and_append(records, args.out)
    llm.shutdown()


if __name__ == "__main__":
    main()
