"""Widens an EAGLE-3 head along with the model that it drafts for, so that it drafts the same.

    python tools/widen_head.py SOURCE MODEL OUT --hidden 5120 --heads 32 --kv-heads 8 \
        --intermediate 14336 --vocab 151936

MODEL is the small model, whose embeddings the head uses. See `widen_model.py`: the first dimensions
of every state are the small head's, the others zero, and norms are corrected. The head gets an LM
head of its own for the small model's tokens, as the wide model's has others too; its `d2t` says so.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from widen_model import SCALE, Shape

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def widen_head(source: Path, model: Path, out: Path, shape: Shape, device: str = "cpu") -> None:
    """Writes the wide head's folder. shape: its layer's; the vocabulary is the wide model's."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors", device=device)
    embedding = load_file(model / "model.safetensors", device=device)["model.embed_tokens.weight"]
    old, vocab = config["hidden_size"], len(embedding)
    if math.log2(shape.hidden / old) % 2:
        raise ValueError("hidden must be 4, 16, 64 ... times the source's")
    wide_config = {
        **config,
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "rms_norm_eps": config["rms_norm_eps"] * old / shape.hidden,
        "vocab_size": shape.vocab,
        "draft_vocab_size": vocab,
    }
    wide = dict(_tensors(tensors, config, shape, embedding))
    wide["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(wide_config, indent=2))
    saved = {name: tensor.to("cpu").contiguous() for name, tensor in wide.items()}
    save_file(saved, out / "model.safetensors", metadata={"format": "pt"})


def _tensors(
    tensors: dict[str, Tensor], config: dict[str, int], shape: Shape, embedding: Tensor
) -> list[tuple[str, Tensor]]:
    """Returns the wide tensors by name. Columns of zeros in every state have random weights."""
    old, hidden, dim = config["hidden_size"], shape.hidden, config["head_dim"]
    taps = tensors["fc.weight"].shape[1] // old
    make = torch.Generator(embedding.device).manual_seed(0)

    def new(rows: int, columns: int, random: bool = True) -> Tensor:
        made = torch.zeros(rows, columns, dtype=embedding.dtype, device=embedding.device)
        return made.normal_(0.0, SCALE, generator=make) if random else made

    def norm(name: str) -> tuple[str, Tensor]:
        parts = tensors[name].view(-1, old) / math.sqrt(hidden / old)
        padded = torch.nn.functional.pad(parts, (0, hidden - old))
        return name, padded.flatten()

    found = [norm("norm.weight"), *(norm(f"midlayer.{name}.weight") for name in NORMS)]
    if "input_norm.weight" in tensors:
        found.append(norm("input_norm.weight"))
    fc = new(hidden, taps * hidden).view(hidden, taps, hidden)
    fc[:, :, :old] = 0.0
    fc[:old, :, :old] = tensors["fc.weight"].view(old, taps, old)
    found.append(("fc.weight", fc.flatten(1)))
    serves, before = shape.heads // shape.kv_heads, config["num_attention_heads"]
    group = before // config["num_key_value_heads"]
    heads = [head // group * serves + head % group for head in range(before)]
    places = {"q": heads, "k": list(range(before // group)), "v": list(range(before // group))}
    counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    for kind, own in places.items():
        name = f"midlayer.self_attn.{kind}_proj.weight"
        weight = new(counts[kind] * dim, 2 * hidden).view(-1, dim, 2, hidden)
        weight[own, :, :, :old] = tensors[name].view(-1, dim, 2, old)
        found.append((name, weight.reshape(-1, 2 * hidden)))
    name = "midlayer.self_attn.o_proj.weight"
    output = new(hidden, shape.heads * dim, random=False)
    output.view(hidden, -1, dim)[:old, heads] = tensors[name].view(old, -1, dim)
    found.append((name, output))
    for kind in ("gate", "up"):
        name = f"midlayer.mlp.{kind}_proj.weight"
        weight = new(shape.intermediate, hidden)
        weight[: config["intermediate_size"], :old] = tensors[name]
        found.append((name, weight))
    name = "midlayer.mlp.down_proj.weight"
    down = new(hidden, shape.intermediate, random=False)
    down[:old, : config["intermediate_size"]] = tensors[name]
    head = new(len(embedding), hidden)
    head[:, :old] = embedding
    return [*found, (name, down), ("lm_head.weight", head)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("source", "model", "out"):
        parser.add_argument(name, type=Path)
    for name in ("hidden", "heads", "kv-heads", "intermediate", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    shape = Shape(args.hidden, args.heads, args.kv_heads, 1, args.intermediate, args.vocab)
    widen_head(args.source, args.model, args.out, shape)


if __name__ == "__main__":
    main()
