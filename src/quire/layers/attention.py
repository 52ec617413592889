"""Self-attention over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire import ops
from quire.errors import ConfigError
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.linear import Linear, Output
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryTable
from quire.parallel import ProcessGroup
from quire.quantization import LinearMethod


class Attention(nn.Module):
    """Multi-head attention with grouped KV heads (Ainslie et al. 2023); heads are shared out over
    ranks, and where there are fewer KV heads than ranks, neighbouring ranks hold copies."""

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: RotaryTable | None,
        group: ProcessGroup,
        method: LinearMethod,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if heads % group.world:
            raise ConfigError(
                f"{heads} attention heads cannot be shared out over {group.world} ranks",
                "tensor_parallel_size",
            )
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.softcap = softcap
        # A list hides the shared table from the module tree: every layer holds the same one.
        self._rotary = [rotary]
        kv_size = kv_heads * head_dim
        self.qkv = Linear(
            hidden,
            [
                Output("q", heads * head_dim, head_dim),
                Output("k", kv_size, head_dim),
                Output("v", kv_size, head_dim),
            ],
            bias=qkv_bias,
            split="outputs",
            group=group,
            method=method,
            device=device,
            dtype=dtype,
        )
        self.out = Linear(
            heads * head_dim,
            hidden,
            bias=out_bias,
            split="inputs",
            unit=head_dim,
            group=group,
            method=method,
            device=device,
            dtype=dtype,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, device=device, dtype=dtype)

    @property
    def local_kv_heads(self) -> int:
        return self.qkv.sizes[1] // self.head_dim

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm,
        batch: ForwardBatch,
        group: GroupBatch,
        kv: ops.KVLayer,
    ) -> Tensor:
        """x + attention(norm(x)), [T, hidden] -> [T, hidden]."""
        qkv = self.qkv(x, norm=norm)
        rotary = self._rotary[0]
        q = ops.qk_norm_rope_store(
            qkv.view(len(x), -1, self.head_dim),
            kv,
            positions=batch.positions,
            slots=group.slots,
            cos_sin=None if rotary is None else rotary.cos_sin,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            scratch=group.scratch,
        )
        out = ops.paged_attention(
            q,
            kv,
            batch.query_start,
            batch.seq_lens,
            group.block_table,
            q_lens=batch.q_lens,
            max_q_len=batch.max_q_len,
            max_seq_len=batch.max_seq_len,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            scratch=group.scratch,
        )
        hidden: Tensor = self.out(out.reshape(len(x), -1), residual=x)
        return hidden
