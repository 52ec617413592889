"""Widens a Qwen3 checkpoint to the cost of a larger model, so that it computes the same logits.

    python tools/widen_model.py SOURCE OUT --hidden 5120 --heads 80 --kv-heads 16 --layers 32 \
        --intermediate 11008 --vocab 151936

A benchmark of speculative decoding then has a target with the cost of a large model and the text of
the small one. Drafts are accepted as often as on real text.

The first dimensions of the residual stream are the small model's, the others stay zero. A norm over
k times as many dimensions divides by a root mean square that is sqrt(k) smaller, so its weights are
divided by sqrt(k), and its epsilon by k: exact with k = 4 or 16, as 5120 = 16 * 320. Heads are
added to each group behind those that are there, and count for nothing in the output; so do added
intermediate dimensions and layers. Weights that cannot matter are random: zeros might be cheaper.

Tokens beyond the vocabulary must never be drawn. One more dimension of the stream is a small
constant in every embedding, which no layer reads or changes. The last norm brings it to the order
of one, and the head's rows for those tokens make a large negative logit of it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CONSTANT = 2.0**-14
"""The value of the additional dimension: its square is lost beside those of the stream's."""
GAIN = 2.0**15
BARRED = -3.0e4
"""The last norm's weight for it, and the head's weight for barred tokens."""
SCALE = 0.02
SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model. kv_heads: KV heads; each serves heads / kv_heads query heads."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        return cls(
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["num_hidden_layers"],
            config["intermediate_size"],
            config["vocab_size"],
        )


class Widener:
    """Makes the tensors of the wide model one by one.

    Raises ValueError if the shape does not hold the small model, or the norms would not be exact.
    """

    def __init__(self, source: Path, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
        self.config = json.loads((source / "config.json").read_text())
        if self.config["architectures"] != ["Qwen3ForCausalLM"]:
            raise ValueError(f"{self.config['architectures']} is not supported")
        self.old, self.new, self._seed = Shape.of(self.config), shape, seed
        self._file = safe_open(source / "model.safetensors", "pt")
        self._device = device
        self._check()
        self._factor = math.sqrt(shape.hidden / self.old.hidden)

    def _check(self) -> None:
        for name in Shape.__dataclass_fields__:
            if getattr(self.new, name) < getattr(self.old, name):
                raise ValueError(f"{name} must be at least {getattr(self.old, name)}")
        ratio = self.new.hidden / self.old.hidden
        if math.log2(ratio) % 2:
            raise ValueError("hidden must be 4, 16, 64 ... times the source's")
        if self._bars and self.new.hidden == self.old.hidden:
            raise ValueError("a larger vocabulary needs a larger hidden")
        if self.new.heads % self.new.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        if self.new.heads // self.new.kv_heads < self.old.heads // self.old.kv_heads:
            raise ValueError("a KV head must serve as many heads as the source's")

    @property
    def _bars(self) -> bool:
        """Whether there are tokens that must never be drawn."""
        return self.new.vocab > self.old.vocab

    def wide_config(self) -> dict[str, Any]:
        """Returns the config.json of the wide model."""
        new = self.new
        return {
            **self.config,
            "hidden_size": new.hidden,
            "num_attention_heads": new.heads,
            "num_key_value_heads": new.kv_heads,
            "num_hidden_layers": new.layers,
            "max_window_layers": new.layers,
            "intermediate_size": new.intermediate,
            "vocab_size": new.vocab,
            "rms_norm_eps": self.config["rms_norm_eps"] / self._factor**2,
            "tie_word_embeddings": False,
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors by name, in the source's dtype."""
        old, new = self.old, self.new
        embedding = self._get("model.embed_tokens.weight")
        wide = torch.zeros(new.vocab, new.hidden, dtype=embedding.dtype, device=self._device)
        wide[: old.vocab, : old.hidden] = embedding
        if self._bars:
            wide[:, old.hidden] = CONSTANT
        yield "model.embed_tokens.weight", wide
        for layer in range(new.layers):
            yield from self._layer(layer)
        norm = self._norm("model.norm.weight")
        if self._bars:
            norm[old.hidden] = GAIN
        yield "model.norm.weight", norm
        head = self._random(new.vocab, new.hidden, key=1)
        tied = self.config["tie_word_embeddings"]
        head[: old.vocab, : old.hidden] = embedding if tied else self._get("lm_head.weight")
        if self._bars:
            # The dimensions behind it are zeros in every hidden state.
            head[: old.vocab, old.hidden] = 0.0
            head[old.vocab :] = 0.0
            head[old.vocab :, old.hidden] = BARRED
        yield "lm_head.weight", head

    def _layer(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        old, new, stem = self.old, self.new, f"model.layers.{layer}"
        real = layer < old.layers
        dim = self.config["head_dim"]
        own = stem if real else "model.layers.0"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}.{name}.weight", self._norm(f"{own}.{name}.weight")
        for name in ("q_norm", "k_norm"):
            yield f"{stem}.self_attn.{name}.weight", self._get(f"{own}.self_attn.{name}.weight")
        heads = self._heads()
        rows = {"q": heads, "k": list(range(old.kv_heads)), "v": list(range(old.kv_heads))}
        counts = {"q": new.heads, "k": new.kv_heads, "v": new.kv_heads}
        for number, kind in enumerate("qkv"):
            wide = self._random(counts[kind] * dim, new.hidden, key=8 * layer + 16 + number)
            if real:
                source = self._get(f"{stem}.self_attn.{kind}_proj.weight").view(-1, dim, old.hidden)
                places = wide.view(-1, dim, new.hidden)
                places[rows[kind], :, : old.hidden] = source
            yield f"{stem}.self_attn.{kind}_proj.weight", wide
        output = self._zeros(new.hidden, new.heads * dim)
        if real:
            source = self._get(f"{stem}.self_attn.o_proj.weight").view(old.hidden, -1, dim)
            output.view(new.hidden, -1, dim)[: old.hidden, heads] = source
        yield f"{stem}.self_attn.o_proj.weight", output
        for number, kind in enumerate(("gate", "up")):
            wide = self._random(new.intermediate, new.hidden, key=8 * layer + 20 + number)
            if real:
                source = self._get(f"{stem}.mlp.{kind}_proj.weight")
                wide[: old.intermediate, : old.hidden] = source
            yield f"{stem}.mlp.{kind}_proj.weight", wide
        down = self._zeros(new.hidden, new.intermediate)
        if real:
            source = self._get(f"{stem}.mlp.down_proj.weight")
            down[: old.hidden, : old.intermediate] = source
        yield f"{stem}.mlp.down_proj.weight", down

    def _heads(self) -> list[int]:
        """Returns where the source's heads are: the first of their KV head's group."""
        before, after = self.old.heads // self.old.kv_heads, self.new.heads // self.new.kv_heads
        return [head // before * after + head % before for head in range(self.old.heads)]

    def _get(self, name: str) -> Tensor:
        return self._file.get_tensor(name).to(self._device)

    def _norm(self, name: str) -> Tensor:
        weight = self._get(name)
        wide = torch.zeros(self.new.hidden, dtype=weight.dtype, device=self._device)
        wide[: self.old.hidden] = weight / self._factor
        return wide

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _random(self, *shape: int, key: int) -> Tensor:
        make = torch.Generator(self._device).manual_seed(self._seed + key)
        wide = torch.empty(shape, dtype=self._dtype, device=self._device)
        return wide.normal_(0.0, SCALE, generator=make)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._file.get_tensor("model.norm.weight").dtype
        return dtype


def widen(source: Path, out: Path, shape: Shape, device: str = "cpu") -> None:
    """Writes the wide model's folder, with the source's tokenizer."""
    widener = Widener(source, shape, device=device)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    (out / "config.json").write_text(json.dumps(widener.wide_config(), indent=2))
    shards: dict[str, str] = {}
    held: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(shards.values())):05d}.safetensors"
        save_file(held, out / name, metadata={"format": "pt"})
        shards.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in widener.tensors():
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor.to("cpu", copy=True).contiguous()
    flush()
    index = {"metadata": {}, "weight_map": shards}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    for name in Shape.__dataclass_fields__:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help="default: the source's")
    parser.add_argument("--device", default="cpu", help="where tensors are made")
    args = parser.parse_args()
    own = Shape.of(json.loads((args.source / "config.json").read_text()))
    given = {name: getattr(args, name) for name in Shape.__dataclass_fields__}
    shape = Shape(**{name: value or getattr(own, name) for name, value in given.items()})
    widen(args.source, args.out, shape, args.device)
    print(f"{args.out}: {shape}")


if __name__ == "__main__":
    main()
