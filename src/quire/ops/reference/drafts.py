"""Drafts of a second model, between its passes.

M is the number of lanes, R of rows. A model's position in a lane is the first that it has not
computed; what it draws behind the known text is a draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.rows import Drafts


class DraftRows(NamedTuple):
    """The rows for which a model drafts, in descending order of their drafts: int32.

    lanes: [M], -1 behind the last row. counts: [M], drafts wanted of each row. query_start:
        [M + 1], where the tokens begin that the first pass computes for each.
    """

    lanes: Tensor
    counts: Tensor
    query_start: Tensor


class PassRows(NamedTuple):
    """The rows of the next pass, int32, written by the one before.

    lanes: [M], -1 behind the last row. query_start: [M + 1], of a token each. lengths: [M], the
    position of the token that the pass gives. places: [M], of the first pass, the place of each
    row's last token. depth: [1], passes begun.
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
    """Prepares the first pass. rows, counts, query_start: those of `DraftRows`.

    position: int32 [M], the text's: its last known token. own: int32 [M], the model's, set back to
    what the text confirms. used: int32 [M], gets how many tokens beside the first a row's pass
    computes: those up to the last known one, as far as the row has places. claims: those of rows
    that want drafts are emptied.
    """
    passes.depth.fill_(1)
    passes.lanes.copy_(rows)
    at = torch.nonzero(rows >= 0).flatten()
    passes.places.zero_()
    if not len(at):
        return
    lane = rows[at].long()
    text = position[lane]
    first = torch.minimum(own[lane], text)
    own[lane] = first
    real = torch.minimum(query_start[at + 1] - query_start[at], text + 1 - first)
    used[lane] = real - 1
    passes.places[at] = query_start[at] + real - 1
    passes.lengths[at] = first + real
    wanted = lane[counts[at] > 0]
    claims.start[wanted] = position[wanted] + 1
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
    """Moves the model on, and keeps what it drew behind the known text as drafts.

    drawn: int32 [R], of the first R of `passes`' rows. tokens: int32 [M, max_len]. A row takes part
    in the next pass if it wants more drafts than there were passes. Lanes that have ended stay as
    they are.
    """
    lanes = passes.lanes[: len(drawn)]
    at = torch.nonzero(lanes >= 0).flatten()
    lane, length = lanes[at].long(), passes.lengths[at]
    live = position[lane] >= 0
    own[lane] = torch.where(live, length, own[lane])
    place = length - position[lane] - 1
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
