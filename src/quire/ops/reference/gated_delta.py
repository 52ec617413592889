"""The gated delta rule, its convolution and its norm, in float32, or float64 if states are float64.

The state S is a matrix [Dk, Dv] per value head. Each token has k and q of unit length, a decay
g <= 0 and a strength 0 < b < 1 (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"):

    S = exp(g) S;  S += b k (v - Sᵀ k)ᵀ;  out = Sᵀ q / sqrt(Dk)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.choose import current_policy
from quire.ops.reference import dense
from quire.ops.rows import PROMPT
from quire.ops.state import StateLayer, StateRows

CHUNK = 64
"""Tokens of a chunk in the chunked form."""
_EPS = 1e-6
"""Epsilon of the norms of q and k, as in the published code."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens [first, last) of a batch, all of one row.

    Attributes:
        first: index of the first token in the batch.
        last: index after the last token.
        start: position of the first token. At position 0 the state begins as zeros.
        slot: slot of the row's state.
        saves: slots that get a copy of the state after the last token.
        drafts: number of drafts at the end of the span.
    """

    first: int
    last: int
    start: int
    slot: int
    saves: tuple[int, ...] = ()
    drafts: int = 0

    @property
    def certain(self) -> int:
        """Number of tokens that are not drafts."""
        return self.last - self.first - self.drafts


def _spans(rows: StateRows, whole: bool) -> Iterator[_Span]:
    """Yields the real tokens of each row. Unless `whole`, they are cut at positions where a copy of
    the state must be saved."""
    bounds = rows.query_start.tolist()
    real = (rows.ids >= 0).tolist()
    for row, lane in enumerate(rows.lanes.tolist()):
        first, end = bounds[row], bounds[row + 1]
        last = first + sum(real[first:end])
        if lane < 0 or first == last:
            continue
        start = int(rows.seq_lens[row]) - (end - first)
        slot, *pairs = rows.table[lane].tolist()
        saves = {
            place: slot
            for place, slot in zip(pairs[::2], pairs[1::2], strict=True)
            if start < place <= start + last - first
        }
        if rows.flags is not None and not int(rows.flags[row]) & PROMPT:
            yield _Span(first, last, start, slot, drafts=last - first - 1)
            continue
        if whole:
            yield _Span(first, last, start, slot)
            continue
        at = start
        for place in sorted(saves):
            yield _Span(first + at - start, first + place - start, at, slot, (saves[place],))
            at = place
        if first + at - start < last:
            yield _Span(first + at - start, last, at, slot)


def short_conv(x: Tensor, weight: Tensor, state: StateLayer, rows: StateRows) -> Tensor:
    """Returns silu of the causal convolution of each channel over its row, [T, C].

    The results of padding are undefined.

    Args:
        x: [T, C], any stride between tokens.
        weight: [C, K].
        state: `conv` holds the inputs before each row. It is replaced by the row's last inputs.
    """
    taps = weight.shape[1]
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    factors = weight.to(state.recurrent.dtype)
    for span in _spans(rows, whole=False):
        before = state.conv[span.slot]
        before = before[_accepted(state, span, 0) :][: taps - 1]
        history = before if span.start else torch.zeros_like(before)
        inputs = torch.cat([history.to(x.dtype), x[span.first : span.last]])
        count = span.last - span.first
        wide = inputs.to(factors.dtype)
        total = sum(wide[tap : tap + count] * factors[:, tap] for tap in range(taps))
        out[span.first : span.last] = dense.silu(torch.as_tensor(total)).to(x.dtype)
        kept = inputs[span.certain :]
        for slot in (span.slot, *span.saves):
            state.conv[slot, : len(kept)] = kept
            if state.base is not None:
                state.base[slot, : x.shape[1]] = 2 * (span.start + span.certain)
    return out


def _accepted(state: StateLayer, span: _Span, entry: int) -> int:
    """Returns how many of the last row's drafts were accepted. `entry` is an index of
    `StateLayer.base`."""
    if state.base is None or not span.start:
        return 0
    return span.start - int(state.base[span.slot, entry]) // 2


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: StateLayer,
    rows: StateRows,
) -> Tensor:
    """Returns the gated delta rule's output [T, Hv, Dv], and advances the rows' states.

    Rows of one token use the recurrent form, others the chunked form. The two round differently.
    So all rows use the recurrent form if results must not depend on how a prompt is split over
    steps. The results of padding are undefined.

    Args:
        mixed: [T, 2 Hk Dk + Hv Dv], q, k and v of all heads side by side. Each of the Hk heads of q
            and k serves Hv / Hk neighbouring value heads. The rule scales q and k to unit length.
        a: [T, Hv]; the decay is g = -exp(a_log) softplus(a + dt_bias).
        b: [T, Hv], with the stride of `a` between tokens; the strength is sigmoid(b).
        a_log: float32 [Hv].
        dt_bias: float32 [Hv].
    """
    by_token = current_policy().deterministic
    matrices = state.recurrent
    inputs = _inputs(mixed, a, b, a_log, dt_bias, matrices)
    q, k, v, decay, strength = inputs
    out = torch.zeros_like(v)
    single: list[_Span] = []
    for span in _spans(rows, whole=False):
        if state.drafts:
            before = _resumed(state, span, a_log, dt_bias, mixed.shape[1])
        else:
            before = matrices[span.slot] if span.start else torch.zeros_like(matrices[0])
        if span.last - span.first == 1 and not span.saves and span.start and not state.drafts:
            single.append(span)
            continue
        behind = span.first + span.certain
        if by_token or (span.certain == 1 and not span.saves):
            after = before
            for token in range(span.first, behind):
                out[token], after = _step(inputs, token, after)
        else:
            part = slice(span.first, behind)
            out[part], after = chunked(
                q[part], k[part], v[part], decay[part], strength[part], before
            )
        for slot in (span.slot, *span.saves):
            matrices[slot] = after
        for token in range(behind, span.last):
            out[token], after = _step(inputs, token, after)
        _keep_drafts(state, span, mixed, a, b)
    if single:
        tokens = torch.tensor([span.first for span in single], device=mixed.device)
        slots = torch.tensor([span.slot for span in single], device=mixed.device)
        out[tokens], matrices[slots] = recurrent(
            q[tokens], k[tokens], v[tokens], decay[tokens], strength[tokens], matrices[slots]
        )
    return out.to(mixed.dtype)


def _inputs(
    mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, decay and strength of T tokens, as `recurrent` takes them."""
    _, heads, key_dim, value_dim = matrices.shape
    dtype = matrices.dtype
    width = (mixed.shape[1] - heads * value_dim) // 2
    parts = torch.split(mixed.to(dtype), [width, width, heads * value_dim], dim=1)
    repeat = heads * key_dim // width
    q, k = (_unit(part.reshape(len(part), -1, key_dim), repeat) for part in parts[:2])
    v = parts[2].reshape(len(mixed), heads, value_dim)
    decay = -a_log.to(dtype).exp() * dense.softplus(a.to(dtype) + dt_bias.to(dtype))
    return q * key_dim**-0.5, k, v, decay, dense.sigmoid(b.to(dtype))


def _resumed(
    state: StateLayer, span: _Span, a_log: Tensor, dt_bias: Tensor, channels: int
) -> Tensor:
    """Returns the state that a row begins with: its slot's state, after the last row's accepted
    drafts."""
    matrices = state.recurrent
    if not span.start:
        return torch.zeros_like(matrices[0])
    matrix = matrices[span.slot]
    count = _accepted(state, span, channels)
    if count and state.mixed is not None and state.gates is not None and state.base is not None:
        which = int(state.base[span.slot, channels]) % 2
        mixed, gates = (part[span.slot, which, :count] for part in (state.mixed, state.gates))
        a, b = gates.chunk(2, dim=1)
        inputs = _inputs(mixed, a, b, a_log, dt_bias, matrices)
        for token in range(count):
            matrix = _step(inputs, token, matrix)[1]
    return matrix


def _step(inputs: tuple[Tensor, ...], token: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of `_inputs`. Returns its output [H, Dv] and the new state [H, Dk, Dv]."""
    q, k, v, decay, strength = (x[token : token + 1] for x in inputs)
    out, after = recurrent(q, k, v, decay, strength, state.unsqueeze(0))
    return out[0], after[0]


def _keep_drafts(state: StateLayer, span: _Span, mixed: Tensor, a: Tensor, b: Tensor) -> None:
    """Keeps the rule's inputs for a row's drafts, and the number of tokens in the state."""
    if state.mixed is None or state.gates is None or state.base is None:
        return
    channels = mixed.shape[1]
    which = 1 - int(state.base[span.slot, channels]) % 2
    tokens = slice(span.first + span.certain, span.last)
    heads, value_dim = state.recurrent.shape[1], state.recurrent.shape[3]
    queries = (channels - heads * value_dim) // 2  # Queries are dropped: they change no state.
    state.mixed[span.slot, which, : span.drafts, queries:] = mixed[tokens, queries:]
    state.gates[span.slot, which, : span.drafts] = torch.cat([a[tokens], b[tokens]], dim=1)
    for slot in (span.slot, *span.saves):
        state.base[slot, channels:] = 2 * (span.start + span.certain) + which


def _unit(x: Tensor, repeat: int) -> Tensor:
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
    return x.repeat_interleave(repeat, dim=1)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one token of each of B rows. Returns their outputs [B, H, Dv] and the new states.

    Args:
        q: [B, H, Dk].
        k: [B, H, Dk].
        v: [B, H, Dv].
        decay: [B, H].
        strength: [B, H].
        state: [B, H, Dk, Dv].
    """
    product = _by_pairs if current_policy().deterministic else _by_blas
    state = state * decay.exp()[..., None, None]
    missing = v - product(state, k)
    state = state + k.unsqueeze(-1) * (missing * strength.unsqueeze(-1)).unsqueeze(-2)
    return product(state, q), state


def _by_blas(state: Tensor, x: Tensor) -> Tensor:
    """Returns Sᵀ x, [B, H, Dv]."""
    return torch.einsum("bhkv,bhk->bhv", state, x)


def _by_pairs(state: Tensor, x: Tensor) -> Tensor:
    """Returns Sᵀ x, [B, H, Dv], summed in an order that depends on Dk alone."""
    parts = state * x.unsqueeze(-1)
    while (count := parts.shape[2]) > 1:
        half = -(-count // 2)
        parts[:, :, : count - half] += parts[:, :, half:]
        parts = parts[:, :, :half]
    return parts.squeeze(2)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the n tokens of one row by matrix products, `CHUNK` tokens at a time.

    Returns the outputs [n, H, Dv] and the new state. G is the running sum of g within a chunk, and
    D = exp(G_i - G_j). The tokens' writes x solve the triangular system
    (1 + tril(b k kᵀ D, -1)) x = b (v - exp(G) S k).

    Args:
        q: [n, H, Dk].
        k: [n, H, Dk].
        v: [n, H, Dv].
        decay: [n, H].
        strength: [n, H].
        state: [H, Dk, Dv].
    """
    outputs = []
    for first in range(0, len(q), CHUNK):
        part = slice(first, first + CHUNK)
        qc, kc, vc = (x[part].transpose(0, 1) for x in (q, k, v))
        total = decay[part].t().cumsum(1)
        beta = strength[part].t().unsqueeze(-1)
        between = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        system = (beta * (kc @ kc.transpose(1, 2)) * between).tril(-1)
        grown = total.exp().unsqueeze(-1)
        wanted = beta * (vc - grown * (kc @ state))
        new = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(grown * (qc @ state) + ((qc @ kc.transpose(1, 2)) * between) @ new)
        left = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * total[:, -1].exp()[:, None, None] + (kc * left).transpose(1, 2) @ new
    return torch.cat(outputs, 1).transpose(0, 1), state


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns rms_norm(x) weight silu(gate), head by head, [T, H D] in x's dtype.

    Args:
        x: [T, H, D].
        gate: [T, H D], any stride between tokens.
        weight: [D].
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (normed.flatten(1) * dense.silu(gate.to(wide.dtype))).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x sigmoid(gate), [T, W]. The gate is [T, W] with any stride between tokens."""
    return x * dense.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32))).to(x.dtype)
