"""The training loop, for plain training and for distillation from a larger model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from batches import IGNORE, Rows, batches
from hybrid import Hybrid
from model import Mask, Qwen3
from optimizer import Optimizer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask


@dataclass
class Plan:
    """A training run; `steps` are optimizer steps of batch x length tokens."""

    steps: int
    chat_steps: int  # the last of `steps`, on conversations only
    batch: int
    length: int
    lr: float
    decay: float = 0.1
    warmup: int = 100
    cooldown: float = 0.35  # this last share of the steps lowers the rate linearly to zero
    log: list[dict[str, float]] = field(default_factory=list)


def rate(step: int, plan: Plan) -> float:
    """Warm up, hold, then fall linearly to zero."""
    left = (plan.steps - step) / plan.steps
    return min(1.0, (step + 1) / plan.warmup, left / plan.cooldown)


def document_mask(document: Tensor, compiled: Callable | None) -> Mask:
    """Causal attention within a document; `document` is [batch, length]."""
    batch, length = document.shape
    if compiled is None:
        same = document[:, :, None] == document[:, None, :]
        return (same & torch.ones(length, length).bool().tril().to(same.device))[:, None]

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    return compiled(allowed, batch, None, length, length, device=document.device)


def losses(logits: Tensor, target: Tensor, teacher: Tensor | None, hard: float) -> Tensor:
    """Mean loss: cross-entropy, or KL from the teacher plus `hard` times cross-entropy."""
    logits = logits.float().flatten(0, 1)
    entropy = functional.cross_entropy(logits, target.flatten(), ignore_index=IGNORE)
    if teacher is None:
        return entropy
    counts = (target.flatten() != IGNORE).float()
    p = functional.log_softmax(teacher.float().flatten(0, 1), dim=-1)
    q = functional.log_softmax(logits, dim=-1)
    divergence = ((p.exp() * (p - q)).sum(-1) * counts).sum() / counts.sum().clamp(min=1)
    return divergence + hard * entropy


class Trainer:
    """Holds the model, its compiled forms and the optimizer."""

    def __init__(self, model: Qwen3 | Hybrid, plan: Plan, teacher: Qwen3 | None = None) -> None:
        self.model, self.plan = model, plan
        self.device = next(model.parameters()).device
        cuda = self.device.type == "cuda"
        self.optimizer = Optimizer(model, plan.lr, plan.decay, fused=cuda)
        self.mask = torch.compile(create_block_mask) if cuda else None
        self.run: nn.Module | Callable = torch.compile(model, dynamic=False) if cuda else model
        self.loss = torch.compile(losses, dynamic=False) if cuda else losses
        self.teacher: nn.Module | Callable | None = None
        if teacher is not None:
            teacher.eval()
            self.teacher = torch.compile(teacher, dynamic=False) if cuda else teacher

    def _forward(self, batch: Rows, hard: float = 0.0, taught: bool = True) -> Tensor:
        tokens, target, document = batch
        mask = document_mask(document, self.mask)
        more = (document,) if isinstance(self.model, Hybrid) else ()
        with torch.autocast(self.device.type, torch.bfloat16):
            guide = None
            if self.teacher is not None and self.model.training and taught:
                with torch.no_grad():
                    guide = self.teacher(tokens, mask)
            logits = self.run(tokens, mask, *more)
        return self.loss(logits, target, guide, hard)

    def step(self, batch: Rows, number: int, hard: float = 0.0, taught: bool = True) -> Tensor:
        """One update; returns the loss, still on the device. taught: whether by the teacher."""
        loss = self._forward(batch, hard, taught)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(rate(number, self.plan))
        return loss.detach()

    @torch.no_grad()
    def validate(self, rows: Rows) -> float:
        """Mean loss in nats per learned token."""
        self.model.eval()
        total, count = 0.0, 0
        for batch in batches(rows, self.plan.batch, None):
            n = int((batch[1] != IGNORE).sum())
            total += float(self._forward(batch)) * n
            count += n
        self.model.train()
        return total / count


def train(
    trainer: Trainer,
    text: Callable[[int], Rows],
    chat: Callable[[int], Rows],
    valid: Rows,
    hard: tuple[float, float] = (0.0, 0.0),
    every: int = 200,
) -> list[dict[str, float]]:
    """Run the plan: `text(epoch)` rows first, then `chat(epoch)` rows; returns the log.

    `hard` weighs the cross-entropy beside a teacher, in the text and in the chat phase.
    """
    plan = trainer.plan
    trainer.model.train()
    text_steps = plan.steps - plan.chat_steps
    feeds = {"text": forever(text, plan.batch), "chat": forever(chat, plan.batch)}
    start, recent = time.perf_counter(), []
    for number in range(plan.steps):
        phase = "text" if number < text_steps else "chat"
        recent.append(trainer.step(next(feeds[phase]), number, hard[phase == "chat"]))
        if (number + 1) % every == 0 or number + 1 in (50, text_steps, plan.steps):
            entry = {
                "step": number + 1,
                "tokens": (number + 1) * plan.batch * plan.length,
                "train": torch.stack(recent).mean().item(),
                "valid": trainer.validate(valid),
                "seconds": round(time.perf_counter() - start, 1),
            }
            if not math.isfinite(entry["train"]):
                raise RuntimeError(f"the loss is {entry['train']} at step {number + 1}")
            plan.log.append(entry)
            recent = []
            print(
                phase,
                " ".join(
                    f"{k}={v:.4g}" if k in ("train", "valid") else f"{k}={v}"
                    for k, v in entry.items()
                ),
                flush=True,
            )
    return plan.log


def train_balanced(
    trainer: Trainer, chat: Callable[[int], Rows], plain: Callable[[int], Rows], every: int = 200
) -> None:
    """Runs the plan: of five steps, three learn conversations, and two the teacher's distributions
    on plain text, so that what it knows of that is kept."""
    plan, recent = trainer.plan, []
    trainer.model.train()
    feeds = forever(chat, plan.batch), forever(plain, plan.batch)
    for number in range(plan.steps):
        taught = number % 5 in (1, 3)
        recent.append(trainer.step(next(feeds[taught]), number, taught=taught))
        if (number + 1) % every == 0 or number + 1 == plan.steps:
            plan.log.append({"step": number + 1, "train": torch.stack(recent).mean().item()})
            print("balance", plan.log[-1], flush=True)
            recent = []


def forever(rows: Callable[[int], Rows], size: int) -> Iterator[Rows]:
    """Batches of epoch after epoch, each freshly packed and shuffled."""
    epoch = 0
    while True:
        yield from batches(rows(epoch), size, epoch)
        epoch += 1
