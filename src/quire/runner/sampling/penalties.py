"""Token counts for penalties: a costly column, leased to the lanes that use it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.plan import Admit


class TokenCounts:
    """For each leased slot, which tokens the prompt has and how often each was generated.

    The counts are rebuilt from the token table when a request is admitted, so that preemption need
    not save them.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.slots: dict[int, int] = {}
        self._free: list[int] = []
        self.prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def admit(self, admit: Admit, tokens: Tensor) -> None:
        """tokens: the lane's line of the token table."""
        slot = self._lease(admit.lane)
        known = len(admit.tokens)
        self.prompt[slot] = False
        self.prompt[slot, tokens[: admit.prompt_len].long()] = True
        generated = tokens[admit.prompt_len : known].long()
        self.output[slot] = torch.zeros_like(self.output[slot]).index_add_(
            0, generated, torch.ones_like(generated, dtype=torch.int32)
        )

    def _lease(self, lane: int) -> int:
        if lane not in self.slots:
            if not self._free:
                self._grow()
            self.slots[lane] = self._free.pop()
        return self.slots[lane]

    def _grow(self) -> None:
        old = len(self.prompt)
        new = max(4, 2 * old)
        for name in ("prompt", "output"):
            table = getattr(self, name)
            grown = torch.zeros((new, self.vocab_size), dtype=table.dtype, device=self.device)
            grown[:old] = table
            setattr(self, name, grown)
        self._free = list(range(new - 1, old - 1, -1))

    def free(self, lane: int) -> None:
        """Ends a lane's lease, if it has one."""
        slot = self.slots.pop(lane, None)
        if slot is not None:
            self._free.append(slot)

    def penalize(
        self,
        logits: Tensor,
        slots: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> Tensor:
        """logits float32 [N, V] of leased slots int64 [N]; penalties float32 [N]."""
        counts = self.output.index_select(0, slots)
        generated = counts > 0
        seen = generated | self.prompt.index_select(0, slots)
        factor = repetition.unsqueeze(1)
        logits = torch.where(
            seen, torch.where(logits > 0, logits / factor, logits * factor), logits
        )
        logits = logits - presence.unsqueeze(1) * generated
        return logits - frequency.unsqueeze(1) * counts

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """One more of `tokens` [N] for each of `slots` [N]."""
        one = torch.ones_like(tokens, dtype=torch.int32)
        self.output.index_put_((slots, tokens.long()), one, accumulate=True)
