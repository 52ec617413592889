"""The work between the passes of a draft model.

M is the number of lanes, R the number of rows. The draft model's position in a lane is the first
token that it has not computed. The tokens that it samples after the known text are drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.reference.step import text_position
from quire.ops.rows import Drafts


class DraftRows(NamedTuple):
    """The rows for which the model drafts, int32, in descending order of their number of drafts.

    Attributes:
        lanes: [M], -1 past the last row.
        counts: [M], number of drafts that each row asks for.
        query_start: [M + 1], the first token of each row in the first pass.
    """

    lanes: Tensor
    counts: Tensor
    query_start: Tensor


class PassRows(NamedTuple):
    """The rows of the next pass, int32. Each pass writes the rows of the pass after it.

    Attributes:
        lanes: [M], -1 past the last row.
        query_start: [M + 1]. Each row has one token.
        lengths: [M], position of the token that the pass samples.
        places: [M], index of each row's last token in the first pass.
        depth: [1], number of passes begun.
    """

    lanes: Tensor
    query_start: Tensor
    lengths: Tensor
    places: Tensor
    depth: Tensor


def begin_drafts(
    rows: Tensor,
    counts: Tensor,
    query_start: Tensor,
    position: Tensor,
    own: Tensor,
    used: Tensor,
    claims: Drafts,
    passes: PassRows,
) -> None:
    """Prepares the first pass.

    Args:
        rows, counts, query_start: see `DraftRows`.
        position: int32 [M], the position of the text's last known token, also of held lanes.
        own: int32 [M], the model's position, set back to the confirmed text.
        used: int32 [M]; gets the number of tokens that a row's pass computes after its first token.
            They end at the last known token, or at the row's last place.
        claims: the drafts. The claims of rows that ask for drafts are emptied.
        passes: gets the first pass.
    """
    passes.depth.fill_(1)
    passes.lanes.copy_(rows)
    at = torch.nonzero(rows >= 0).flatten()
    passes.places.zero_()
    if not len(at):
        return
    lane = rows[at].long()
    text = text_position(position[lane])
    first = torch.minimum(own[lane], text)
    own[lane] = first
    real = torch.minimum(query_start[at + 1] - query_start[at], text + 1 - first)
    used[lane] = real - 1
    passes.places[at] = query_start[at] + real - 1
    passes.lengths[at] = first + real
    wanted = lane[counts[at] > 0]
    claims.start[wanted] = text_position(position[wanted]) + 1
    claims.ids[wanted] = -1


def keep_drafts(
    drawn: Tensor,
    counts: Tensor,
    position: Tensor,
    own: Tensor,
    tokens: Tensor,
    claims: Drafts,
    passes: PassRows,
) -> None:
    """Advances the draft model, and keeps the tokens that it sampled past the known text as drafts.

    A row takes part in the next pass if it asks for more drafts than there were passes. Lanes that
    have ended stay as they are.

    Args:
        drawn: int32 [R], for the first R rows of `passes`.
        tokens: int32 [M, max_len].
    """
    lanes = passes.lanes[: len(drawn)]
    at = torch.nonzero(lanes >= 0).flatten()
    lane, length = lanes[at].long(), passes.lengths[at]
    text = text_position(position[lane])
    live = text >= 0
    own[lane] = torch.where(live, length, own[lane])
    place = length - text - 1
    kept = torch.nonzero(live & (counts[at] > 0) & (place >= 0) & (drawn[at] >= 0)).flatten()
    owner, token = lane[kept], drawn[at[kept]]
    tokens[owner, length[kept].long()] = token
    claims.ids[owner, place[kept].long()] = token
    depth = int(passes.depth)
    goes_on = (counts > depth) & (passes.lanes >= 0)
    goes_on[len(drawn) :] = False
    count = int(goes_on.sum())
    passes.lanes.copy_(torch.where(goes_on, passes.lanes, -1))
    passes.lengths.add_(1)
    numbers = torch.arange(len(passes.query_start), device=drawn.device)
    passes.query_start.copy_(numbers.clamp(max=count))
    passes.depth.add_(1)
