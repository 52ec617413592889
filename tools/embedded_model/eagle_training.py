"""Training of an EAGLE-3 head on a model's own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from batches import IGNORE, Rows
from eagle import DEPTH, EagleHead, draft_losses, tap
from model import Qwen3
from optimizer import Optimizer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask
from training import Plan, document_mask, rate

Teacher = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Reads a model: tokens and documents [B, T] give the streams behind some layers [B, T, taps *
hidden], the logits [B, T, vocab], and the embedding of each next token [B, T, hidden]."""


class Qwen3Teacher:
    """Reads quire-tiny."""

    def __init__(self, model: Qwen3, taps: tuple[int, ...]) -> None:
        self.model, self.taps = model.eval().requires_grad_(False), taps
        cuda = next(model.parameters()).is_cuda
        self.mask = torch.compile(create_block_mask) if cuda else None
        self.run: Callable = torch.compile(tap, dynamic=False) if cuda else tap

    def __call__(self, tokens: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model = self.model
        tapped, final = self.run(model, tokens, document_mask(document, self.mask), self.taps)
        logits = functional.linear(final, model.embed_tokens.weight)
        return tapped, logits, model.embed_tokens(functional.pad(tokens[:, 1:], (0, 1)))


class HeadTrainer:
    """Holds the head, the model whose tokens it drafts, and the optimizer.

    Args:
        weight: rows of the model's LM head for the tokens that can be drafted.
        kept: those tokens; None: all.
        depth: drafts for which the head is unrolled.
    """

    def __init__(
        self,
        head: EagleHead,
        teacher: Teacher,
        plan: Plan,
        weight: Tensor,
        kept: Tensor | None = None,
        depth: int = DEPTH,
    ) -> None:
        self.head, self.teacher, self.plan = head, teacher, plan
        self.weight, self.kept, self.depth = weight, kept, depth
        self.device = weight.device.type
        cuda = self.device == "cuda"
        self.optimizer = Optimizer(head, plan.lr, plan.decay, fused=cuda)
        self.run: Callable = torch.compile(self._draft, dynamic=False) if cuda else self._draft

    def _draft(
        self, read: tuple[Tensor, Tensor, Tensor], document: Tensor, learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        tapped, wanted, embedded = read
        states = self.head(tapped, embedded, document, self.depth)
        return draft_losses(states, wanted, self.weight, document, learned, self.kept)

    def losses(self, batch: Rows) -> tuple[Tensor, Tensor]:
        """Returns the loss and the agreement of each draft: see `draft_losses`."""
        tokens, target, document = batch
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                read = self.teacher(tokens, document)
            return self.run(read, document, target != IGNORE)

    def step(self, batch: Rows, number: int) -> Tensor:
        """One update. Returns the loss and the agreement of each draft, still on the device."""
        loss, agreed = self.losses(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step(rate(number, self.plan))
        return torch.cat([loss.detach()[None], agreed.detach()])


def train_head(trainer: HeadTrainer, feed: Iterator[Rows], every: int = 200) -> None:
    """Runs the plan, and prints the loss and how often each draft is the model's choice."""
    plan, recent = trainer.plan, []
    for number in range(plan.steps):
        recent.append(trainer.step(next(feed), number))
        if (number + 1) % every == 0 or number + 1 == plan.steps:
            loss, *agreed = torch.stack(recent).mean(0).tolist()
            plan.log.append({"step": number + 1, "loss": loss, "first": agreed[0]})
            print("head", number + 1, f"{loss:.3f}", *(f"{x:.3f}" for x in agreed), flush=True)
            recent = []
