"""The router of experts, and their products."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.branch import PendingTensor, join_branch
from quire.ops.experts import ExpertCopies, ExpertWeights, Routed, Routing, Swiglu
from quire.ops.reference.dense import linear, rms_norm

_TINY = 1e-20
"""Keeps the sum of the chosen scores from being 0."""


def route(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    live: Tensor,
    norm: RmsScale | None = None,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    first: int = 0,
    count: int | None = None,
    copies: ExpertCopies | None = None,
    ids: Tensor | None = None,
) -> Routed:
    """Returns norm(x) [T, hidden] and each token's experts, best first.

    Logits are norm(x) @ weight [experts, hidden]ᵀ + bias [experts], in fp32.

    Args:
        live: int32 [1], number of tokens that are not padding. Padding comes last.
        correction: fp32 [experts], added to scores for the choice, but not for the weights (Wang et
            al. 2024).
        first: index of this rank's first expert.
        count: number of experts of this rank; by default all.
        copies: the places of experts' copies; replaces `first` and `count`.
        ids: int32 [T, k], memory for the result's ids, or None.
    """
    if norm is not None:
        x = rms_norm(x, *norm)
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ weight.to(wide).t()
    if bias is not None:
        logits += bias
    scores = logits.softmax(1) if routing.score == "softmax" else logits.sigmoid()
    end = len(weight) - first if count is None else count
    return into(ids, choose(x, scores, routing, live, correction, first, end, copies))


def into(ids: Tensor | None, routed: Routed) -> Routed:
    """Returns tokens and their experts with the ids in given memory, unless it is None."""
    return routed if ids is None else routed._replace(ids=ids.copy_(routed.ids))


def choose(
    x: Tensor, scores: Tensor, routing: Routing, live: Tensor, correction: Tensor | None,
    first: int, end: int, copies: ExpertCopies | None,
) -> Routed:  # fmt: skip
    """Returns the experts of scores [T, experts], see `route`. This rank has the experts `first` to
    `end` - 1."""
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        choice = choice.masked_fill(~_allowed(choice, routing), -torch.inf)
    ids = choice.argsort(dim=1, descending=True, stable=True)[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + _TINY)
    tokens = torch.arange(len(x), device=x.device).unsqueeze(1)
    if copies is None:
        local = ids - first
    else:
        local = copies.slots[ids, tokens % copies.counts[ids]].long()
        end = copies.slots.numel()
        chosen = (tokens < live).expand_as(ids).flatten().int()
        copies.loads.index_add_(0, ids.flatten(), chosen)
    known = (local >= 0) & (local < end) & (tokens < live)
    weights = (weights * routing.scale).float()
    return Routed(x, local.masked_fill(~known, -1).int(), weights.masked_fill(~known, 0.0))


def _allowed(choice: Tensor, routing: Routing) -> Tensor:
    """Returns whether each expert is in one of its token's groups, bool [T, experts]."""
    grouped = choice.view(len(choice), routing.groups, -1)
    best = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2)
    chosen = best.argsort(dim=1, descending=True, stable=True)[:, : routing.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return allowed.unsqueeze(2).expand_as(grouped).flatten(1)


def swiglu(x: Tensor, act: Swiglu) -> Tensor:
    """Returns the activation of x [T, 2 * width] = [gate | up], [T, width]."""
    gate, up = x.chunk(2, 1)
    if act.limit:
        gate = gate.clamp(max=act.limit)
        up = up.clamp(-act.limit, act.limit)
    slope = act.alpha if not act.cubic else act.alpha + act.cubic * gate.square()
    return gate * (gate * slope).sigmoid() * (up + act.shift)


def experts_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    act: Swiglu,
    residual: Tensor | PendingTensor | None = None,
) -> Tensor:
    """Returns residual + the weighted sum of down(act(up(x))) over each token's experts.

    The result is [T, hidden]. Experts are added in the order of `ids`. A pending residual is joined
    as late as possible. The twin reads the ids on the host.

    Args:
        x: see `Routed`.
        ids: see `Routed`.
        weights: see `Routed`.
        up: each expert's gate outputs, then its up outputs.
    """
    tokens, top_k = ids.shape
    out = torch.zeros(tokens, top_k, down.outputs, dtype=x.dtype, device=x.device)
    for expert in range(up.experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        bias = None if up.bias is None else up.bias[expert]
        inner = swiglu(linear(x[token], up.expert(expert), bias), act)
        bias = None if down.bias is None else down.bias[expert]
        out[token, place] = linear(inner, down.expert(expert), bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(tokens, down.outputs, dtype=wide, device=x.device)
    for each, weight in zip(out.unbind(1), weights.unbind(1), strict=True):
        total += each.to(wide) * weight.unsqueeze(1)
    onto = join_branch(residual)
    return (total if onto is None else total + onto).to(x.dtype)


def add_gated(y: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Returns y * sigmoid(x @ weight [1, hidden]ᵀ) + residual, [T, hidden]; may overwrite y."""
    y.mul_(torch.nn.functional.linear(x, weight).sigmoid())
    return y if residual is None else y.add_(residual)
