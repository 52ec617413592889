"""Trains a LoRA adapter for the embedded model in half a minute, in plain PyTorch, and serves it.

    python examples/train_lora.py [FOLDER]

The adapter makes the model's stories be about a dragon. Its folder is in PEFT's format, so `quire
serve --lora dragon=FOLDER` and other programs read it too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import quire
from quire import LLM, LoRARequest, SamplingParams
from quire.engine.tokenizer import Tokenizer

MODEL = Path(quire.__file__).parent / "embedded" / "quire-tiny"
RANK, ALPHA, STEPS = 4, 8, 30
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
STORIES = (
    "Once upon a time there was a little dragon. The dragon lived on a hill and loved to fly.",
    "One day, a green dragon saw a girl in the park. The dragon said, \"Do you want to fly?\"",
    "There was a dragon who was sad. He had no friends, because his fire was so hot.",
    "The little dragon went to the lake. She made a fire for her mom and they ate fish.",
    "Tom saw a big dragon in the sky. \"Look, a dragon!\" he said. The dragon smiled at him.",
    "Once upon a time, in a big house, there was a dragon named Ember. Ember liked to play.",
)  # fmt: skip


class Model:
    """The embedded model (Qwen3's architecture), with B A beside some of its weights."""

    def __init__(self) -> None:
        self.config = json.loads((MODEL / "config.json").read_text())
        weights = load_file(MODEL / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.lora: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in range(self.config["num_hidden_layers"]):
            for module in ADAPTED:
                name = f"model.layers.{layer}.{module}"
                outputs, inputs = self.weights[f"{name}.weight"].shape
                a = (torch.randn(RANK, inputs) * inputs**-0.5).requires_grad_()
                self.lora[name] = a, torch.zeros(outputs, RANK, requires_grad=True)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"])
        if name in self.lora:
            a, b = self.lora[name]
            y = y + ALPHA / RANK * F.linear(F.linear(x, a), b)
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-6)

    def attention(self, name: str, x: Tensor) -> Tensor:
        config, batch, length = self.config, *x.shape[:2]

        def heads(part: str) -> Tensor:
            y = self.linear(f"{name}.{part}_proj", x).view(batch, length, -1, config["head_dim"])
            return y if part == "v" else self.rotate(self.norm(f"{name}.{part}_norm", y))

        q, k, v = (heads(part).transpose(1, 2) for part in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turns = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[1]).unsqueeze(1) * turns
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{name}.down_proj", F.silu(gate) * up)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        return F.linear(self.norm("model.norm", x), self.weights["model.embed_tokens.weight"])

    def save(self, folder: Path) -> None:
        """Writes the adapter in PEFT's format."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, parts in self.lora.items():
            for part, tensor in zip("AB", parts, strict=True):
                key = f"base_model.model.{name}.lora_{part}.weight"
                tensors[key] = tensor.detach().bfloat16().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "quire-tiny",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.lora}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(model: Model) -> None:
    tokenizer = Tokenizer.from_path(MODEL)
    texts = [tokenizer.encode(story).tolist() for story in STORIES]
    length = max(map(len, texts))
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    labels = torch.tensor([text + [-100] * (length - len(text)) for text in texts])
    parameters = [part for parts in model.lora.values() for part in parts]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(STEPS):
        loss = F.cross_entropy(model.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.2f}")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dragon-lora")
    torch.manual_seed(0)
    model = Model()
    train(model)
    model.save(folder)
    llm = LLM(enable_lora=True)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for request in (None, LoRARequest("dragon", folder)):
        (output,) = llm.generate(["Once upon a time"], params, lora_request=request)
        print(f"{'base' if request is None else request.name}: {output.outputs[0].text!r}")
    llm.shutdown()


if __name__ == "__main__":
    main()
