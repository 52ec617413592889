"""Training of an EAGLE-3 head on a model's own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from batches import IGNORE, Rows
from eagle import DEPTH, EagleHead, draft_losses, tap
from model import Mask, Qwen3
from optimizer import Optimizer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask
from training import Plan, document_mask, rate


class HeadTrainer:
    """Holds the head, the model whose tokens it drafts, and the optimizer."""

    def __init__(self, head: EagleHead, model: Qwen3, plan: Plan) -> None:
        self.head, self.plan = head, plan
        self.model = model.eval().requires_grad_(False)
        device = next(model.parameters()).device
        cuda = device.type == "cuda"
        self.device = device.type
        self.optimizer = Optimizer(head, plan.lr, plan.decay, fused=cuda)
        self.mask = torch.compile(create_block_mask) if cuda else None
        self.run: Callable = torch.compile(self._losses, dynamic=False) if cuda else self._losses

    def _losses(
        self, tokens: Tensor, document: Tensor, learned: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        model = self.model
        weight = model.embed_tokens.weight
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                tapped, final = tap(model, tokens, mask, self.head.s.taps)
                wanted = functional.linear(final, weight)
                embedded = model.embed_tokens(functional.pad(tokens[:, 1:], (0, 1)))
            states = self.head(tapped, embedded, document, DEPTH)
            return draft_losses(states, wanted, weight, document, learned)

    def step(self, batch: Rows, number: int) -> Tensor:
        """One update. Returns the loss and the agreement of each draft, still on the device."""
        tokens, target, document = batch
        mask = document_mask(document, self.mask)
        loss, agreed = self.run(tokens, document, target != IGNORE, mask)
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
