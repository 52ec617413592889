"""The parts of a step around the model: rows to tokens, logits to tokens, advancing lanes.

A lane is a request's place in the batch state. M is the number of lanes, R of rows, T of token
places, L of logit rows. Twins may read values of host tensors; kernels of the same names may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.kv import AttentionHeads
from quire.ops.reference import random, truncate
from quire.ops.reference.dense import embedding, rms_norm
from quire.ops.rows import (
    HELD,
    LOGITS,
    PROCESSED,
    PROMPT,
    DecodeInputs,
    Drafts,
    Expanded,
    ExpandedGroup,
    LogitRows,
    ProcessedLogits,
    ResultRing,
    StepRows,
)

STOP_TOKEN, LENGTH, BROKEN, LATE = 1, 2, 3, 4
"""Why a row ends or gives no token; the values are those of `quire.plan.StopReason`."""

ENDED = -1
"""The position of a lane whose request has ended. Its later rows compute nothing."""

_FIRST_HELD = -2
"""The held position of a lane at position 0. Position p becomes this minus p."""


def held_position(position: Tensor) -> Tensor:
    """Converts positions to held positions, for lanes whose row was late, and back.

    A held position is below `ENDED`, so that rows of the lane compute nothing. A HELD row continues
    from it.
    """
    return _FIRST_HELD - position


def text_position(position: Tensor) -> Tensor:
    """Returns positions, int32 [n], with held positions converted back."""
    return torch.where(position <= _FIRST_HELD, held_position(position), position)


FIRST_TOKEN = 2
"""Index of the first token's column in the results."""


def scatter(memory: Tensor, packed: Tensor, segments: int, longest: int) -> None:
    """Writes segments of words into memory. No two segments overlap.

    Args:
        memory: int32 [words].
        packed: int32. It begins with a line for each segment: start in memory, number of words,
            offset of its values. The values follow after the lines.
        longest: the most words of a segment.
    """
    values = packed[3 * segments :]
    for start, count, place in packed[: 3 * segments].view(-1, 3).tolist():
        memory[start : start + count] = values[place : place + count]


def copy_blocks(memory: Tensor, src: Tensor, dst: Tensor, most: int) -> None:
    """Copies block `src[i]` to `dst[i]`, int64 [n], in order, at most `most` at a time.

    `memory` is [blocks, ...]. A copy may overwrite the source of an earlier copy."""
    for at in range(0, len(src), most):
        part = slice(at, at + most)
        memory.index_copy_(0, dst[part], memory.index_select(0, src[part]))


def place_drafts(rows: StepRows, position: Tensor, tokens: Tensor, drafts: Drafts) -> None:
    """Writes the drafts that each generating row computes to `tokens`, after the row's last token.

    A row of `q_len` tokens takes up to q_len - 1 drafts: the guesses after the row's first
    position. It takes no drafts if an earlier guess differs from the text. `drafts.used` gets the
    number of drafts.

    Args:
        position: int32 [M], the first position that each lane computes.
        tokens: int32 [M, max_len].
    """
    room = (rows.query_start[1:] - rows.query_start[:-1]).long() - 1
    takes = (rows.lanes >= 0) & ((rows.flags & PROMPT) == 0) & (room >= 1)
    which = torch.nonzero(takes).flatten()
    if not len(which):
        return
    lane, room = rows.lanes[which].long(), room[which]
    claimed, first = drafts.ids[lane], drafts.start[lane].long()
    width = claimed.shape[1]
    known = position[lane].long() + 1 - first
    column = torch.arange(width, device=rows.device)
    places = first.unsqueeze(1) + column
    inside = places.clamp(0, tokens.shape[1] - 1)
    before = column < known.unsqueeze(1)
    differs = (before & (tokens[lane.unsqueeze(1), inside] != claimed)).any(dim=1)
    # The first place without a guess after the text ends the drafts.
    gaps = torch.where(~before & (claimed < 0), column, width)
    used = torch.minimum(gaps.amin(dim=1) - known, room).clamp(min=0)
    used = torch.where((known >= 0) & (known < width) & ~differs, used, 0)
    taken = ~before & (column < (known + used).unsqueeze(1))
    owner = lane.unsqueeze(1).expand_as(places)
    tokens[owner[taken], places[taken]] = claimed[taken]
    drafts.used[lane] = used.int()


def expand_rows(
    rows: StepRows,
    position: Tensor,
    tokens: Tensor,
    tables: Sequence[tuple[Tensor, int]],
    logit_rows: LogitRows,
    *,
    num_tokens: int,
    max_seq_len: int,
    drafts: Drafts | None = None,
) -> Expanded:
    """Returns the model's inputs for the rows' tokens, and fills in `logit_rows`.

    Tokens past the last row get id -1, position 0 and slot -1. Padding rows get length 0. A row's
    block table holds the blocks for its length. The rest of it is undefined.

    Args:
        position: int32 [M], the first position that each lane computes. All places of a row are
            padding if its lane has `ENDED` or is held. A HELD row still has its logit row.
        tokens: int32 [M, max_len].
        tables: for each KV group, its block tables, int32 [M, blocks], and the tokens of a block.
        num_tokens: T.
        max_seq_len: upper bound of the rows' lengths after the step.
        drafts: the result of `place_drafts`, or None if no row has drafts. Unused places for drafts
            are padding.
    """
    start = rows.query_start.long()
    q_lens = start[1:] - start[:-1]
    row = torch.repeat_interleave(torch.arange(len(q_lens), device=rows.device), q_lens)
    offset = torch.arange(len(row), device=rows.device) - start[row]
    lane = rows.lanes.long().clamp(min=0)
    first = torch.where(rows.lanes >= 0, position[lane].clamp(min=0), 0)
    live = torch.where(position[lane] >= 0, q_lens, 0)
    resumes = ((rows.flags & HELD) != 0) & (position[lane] <= _FIRST_HELD) & (rows.lanes >= 0)
    seq_lens = (first + q_lens).int()
    longest = max(1, int(seq_lens.max())) if len(seq_lens) else 1
    own = lane[row]
    positions = first[row] + offset
    real = offset < _computed(rows, live, lane, drafts)[row]
    inside = positions.clamp(max=tokens.shape[1] - 1)
    ids = torch.where(real, tokens[own, inside], -1)
    places = torch.where(real, positions, 0)
    padding = num_tokens - len(row)
    _fill_logit_rows(rows, logit_rows, first, q_lens, live, lane, drafts)
    _resume(rows, logit_rows, resumes, position)
    groups = tuple(
        _expand_group(table, size, lane, own, positions, real, longest, padding)
        for table, size in tables
    )
    return Expanded(
        _padded(ids.int(), padding, -1),
        _padded(places.int(), padding, 0),
        seq_lens,
        groups,
        tuple(q_lens.tolist()),
        longest,
    )


def expand_decodes(
    rows: StepRows,
    position: Tensor,
    tokens: Tensor,
    table: tuple[Tensor, int],
    logit_rows: LogitRows,
    weight: Tensor,
    *,
    max_seq_len: int,
    attention: AttentionHeads,
    even: bool | None = None,
) -> DecodeInputs:
    """Returns the inputs of a step whose rows have one token each, and fills in `logit_rows`.

    It is `expand_rows`, `embedding` and `attention_schedule` in one.

    Args:
        rows: row r is token r, and has at most one logit row. Padding rows come last.
        position: see `expand_rows`.
        tokens: see `expand_rows`.
        table: the block tables of the only KV group, int32 [M, blocks], and the tokens of a block.
        weight: [entries, width], the embedding table.
        max_seq_len: see `expand_rows`.
        attention: the attention of all layers.
        even: see `attention_schedule`.
    """
    expanded = expand_rows(
        rows,
        position,
        tokens,
        [table],
        logit_rows,
        num_tokens=len(rows.lanes),
        max_seq_len=max_seq_len,
    )
    return DecodeInputs(expanded, embedding(expanded.ids, weight), None)


def _computed(rows: StepRows, live: Tensor, lane: Tensor, drafts: Drafts | None) -> Tensor:
    """Returns the number of each row's tokens that are not padding, int64 [R].

    Args:
        live: int64 [R], number of the row's tokens, 0 for lanes that have ended.
    """
    if drafts is None:
        return live
    drafted = ((rows.flags & PROMPT) == 0) & (live > 1)
    return torch.where(drafted, 1 + drafts.used[lane].long(), live)


def _fill_logit_rows(
    rows: StepRows,
    logit_rows: LogitRows,
    first: Tensor,
    q_lens: Tensor,
    live: Tensor,
    lane: Tensor,
    drafts: Drafts | None,
) -> None:
    counts = (rows.logit_start[1:] - rows.logit_start[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts)
    place = torch.arange(len(row), device=rows.device) - rows.logit_start[row]
    behind = q_lens[row] - counts[row] + place
    real = behind < _computed(rows, live, lane, drafts)[row]
    logit_rows.lanes.fill_(-1)
    count = len(row)
    logit_rows.lanes[:count] = torch.where(real, rows.lanes[row], -1)
    logit_rows.tokens[:count] = (rows.query_start[row] + behind).int()
    logit_rows.lengths[:count] = (first[row] + behind + 1).int()
    drafted = (rows.flags[row] & PROMPT) == 0
    logit_rows.ahead[:count] = torch.where(drafted, place, 0).int()


def _resume(rows: StepRows, logit_rows: LogitRows, resumes: Tensor, position: Tensor) -> None:
    """Fills in the logit rows of HELD rows; `resumes` is bool [R]."""
    which = torch.nonzero(resumes).flatten()
    if not len(which):
        return
    lanes, place = rows.lanes[which], rows.logit_start[which].long()
    logit_rows.lanes[place] = lanes
    logit_rows.tokens[place] = -1
    logit_rows.lengths[place] = held_position(position[lanes.long()]) + 1
    logit_rows.ahead[place] = 0


def _expand_group(
    table: Tensor,
    size: int,
    lane: Tensor,
    own: Tensor,
    positions: Tensor,
    real: Tensor,
    longest: int,
    padding: int,
) -> ExpandedGroup:
    block = torch.div(positions, size, rounding_mode="floor")
    blocks = table.view(-1)[own * table.shape[1] + block].long()
    slots = torch.where(real, blocks * size + (positions - block * size), -1)
    columns = -(-longest // size)
    return ExpandedGroup(_padded(slots, padding, -1), table[:, :columns].index_select(0, lane))


def _padded(x: Tensor, count: int, value: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, count), value=value) if count else x


def collect_rows(
    hidden: Tensor,
    rows: StepRows,
    logit_rows: LogitRows,
    position: Tensor,
    last: Tensor,
    kept: Tensor,
    held: Tensor | None = None,
    ring: ResultRing | None = None,
    norm: RmsScale | None = None,
) -> None:
    """Keeps hidden states for the heads, and advances PROMPT rows.

    Args:
        hidden: [T, width].
        position: int32 [M]. A PROMPT row advances its lane's position by the row's tokens.
        last: [at least L, width], output: the hidden states of the logit rows. Lines of logit rows
            without a lane are undefined.
        kept: [at least T, width]; gets all hidden states.
        held: [M, width], the hidden states of lanes that are held, for HELD rows; None if there
            are no such rows.
        ring: advances to its next slot, if given.
        norm: an RMSNorm that is applied to `hidden` first, or None.
    """
    if norm is not None:
        hidden = rms_norm(hidden, *norm)
    if ring is not None:
        ring.turn.copy_((ring.turn + 1) % len(ring.lines))
    kept[: len(hidden)] = hidden
    if len(hidden):
        places = logit_rows.tokens.long().clamp(0, len(hidden) - 1)
        torch.index_select(hidden, 0, places, out=last[: len(places)])
    if held is not None:
        resumed = torch.nonzero((logit_rows.lanes >= 0) & (logit_rows.tokens < 0)).flatten()
        last[resumed] = held[logit_rows.lanes[resumed].long()]
    moved = ((rows.flags & PROMPT) != 0) & (rows.lanes >= 0)
    lanes = rows.lanes[moved].long()
    position[lanes] += (rows.query_start[1:] - rows.query_start[:-1])[moved]


def adjust(
    logits: Tensor,
    rows: LogitRows,
    tokens: Tensor,
    *,
    penalties: Tensor,
    counts: Tensor,
    num_bias: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    num_stops: Tensor,
    stops: Tensor,
    min_total: Tensor,
) -> Tensor:
    """Returns logits [L, vocab] after penalties, biases and minimum lengths, float32 [L, vocab].

    Repetition penalty after Keskar et al., 2019; presence and frequency penalties are OpenAI's.
    Rows without a lane are undefined.

    Args:
        tokens: int32 [M, max_len]. The drafts ahead of a logit row count as generated.
        penalties: float32 [M, 3], repetition, presence, frequency.
        counts: int32 [M, vocab], twice the number of times a token was generated, plus one if the
            prompt contains it.
        num_bias: int32 [M], number of a lane's biases.
        bias_ids: int32 [M, B].
        bias_values: float32 [M, B].
        num_stops: int32 [M], number of a lane's stop tokens.
        stops: int32 [M, S].
        min_total: int32 [M]. Stop tokens are excluded until the text has this length.
    """
    out = logits.float() if logits.dtype != torch.float32 else logits.clone()
    lanes = rows.lanes.long()
    usable = lanes >= 0
    factors = penalties[lanes.clamp(min=0)]
    neutral = torch.tensor([1.0, 0.0, 0.0], device=logits.device)
    penalized = torch.nonzero(usable & (factors != neutral).any(1)).flatten()
    if len(penalized):
        out[penalized] = _penalized(out[penalized], rows, penalized, tokens, factors, counts)
    own = lanes.clamp(min=0)
    biased = torch.nonzero(usable & (num_bias[own] > 0)).flatten()
    if len(biased):
        out[biased] += _table_as_rows(num_bias, bias_ids, bias_values, own[biased], out.shape[1])
    early = torch.nonzero(usable & (rows.lengths < min_total[own]) & (num_stops[own] > 0)).flatten()
    if len(early):
        barred = torch.full_like(stops[own[early]], -torch.inf, dtype=torch.float32)
        out[early] += _table_as_rows(
            num_stops, stops, barred, own[early], out.shape[1], rowwise=True
        )
    return out


def _penalized(
    x: Tensor, rows: LogitRows, which: Tensor, tokens: Tensor, factors: Tensor, counts: Tensor
) -> Tensor:
    lanes = rows.lanes[which].long()
    count = counts.index_select(0, lanes)
    ahead = rows.ahead[which].long().unsqueeze(1)
    most = int(ahead.max())
    if most:
        back = torch.arange(most, device=x.device)
        places = (rows.lengths[which].long().unsqueeze(1) - 1 - back).clamp(min=0)
        drafted = tokens[lanes.unsqueeze(1), places].long()
        held = back < ahead
        count.scatter_add_(1, torch.where(held, drafted, 0), 2 * held.int())
    repetition, presence, frequency = factors[which].unsqueeze(-1).unbind(1)
    x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    generated = count >> 1
    return x - presence * (generated > 0) - frequency * generated


def _table_as_rows(
    num: Tensor, ids: Tensor, values: Tensor, lanes: Tensor, vocab: int, rowwise: bool = False
) -> Tensor:
    """Returns the entries of each lane's table as a dense line, [n, vocab]."""
    keys = ids[lanes]
    entry = torch.arange(keys.shape[1], device=keys.device)
    held = (entry < num[lanes].unsqueeze(1)) & (keys < vocab)
    amounts = torch.where(held, values if rowwise else values[lanes], 0.0)
    dense = torch.zeros(len(lanes), vocab, device=keys.device)
    return dense.scatter_add_(1, torch.where(held, keys, 0).long(), amounts)


def sample(
    logits: Tensor,
    lanes: Tensor,
    position: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    truncate_rows: bool = True,
    cuts: Tensor | None = None,
) -> Tensor:
    """Returns a token for each row, int32 [L], or -1 if a logit is NaN.

    The order is vLLM's: temperature, min-p, top-k (ties kept), top-p of the rest. Tokens are drawn
    by Gumbel-max over counter-based noise, which depends only on seed, sample index and position.
    Rows of lane -1 are undefined. The arguments per lane are columns of one float32 and one int32
    table, of any stride.

    Args:
        logits: [L, vocab], after penalties and masks, dense rows.
        lanes: int32 [L].
        position: int32 [L], position of the new token.
        temperature: per lane; 0 is greedy.
        top_k: per lane; 0 keeps all tokens.
        top_p: per lane; 1 keeps all tokens.
        min_p: per lane; 0 keeps all tokens.
        seed: [M, 2], low and high word.
        sample_index: per lane.
        truncate_rows: False if the caller knows that no row uses top-k, top-p or min-p.
        cuts: int32 [at least L, 2], output or None: the float32 bits of the lowest logit that
            truncation keeps, after temperature, and the last kept entry with that logit. A row
            that keeps all tokens has -inf and the largest int32.
    """
    if cuts is not None:
        cuts[: len(lanes), 0] = torch.tensor(-torch.inf).view(torch.int32)
        cuts[: len(lanes), 1] = torch.iinfo(torch.int32).max
    best, greedy = logits.max(dim=-1)
    own = lanes.long().clamp(min=0)
    random_rows = torch.nonzero((temperature[own] > 0) & (lanes >= 0)).flatten()
    if len(random_rows):
        lane = own[random_rows]
        scaled = logits[random_rows].float() / temperature[lane].unsqueeze(1)
        counter = seed[lane], sample_index[lane], position[random_rows]
        limits = top_k[lane], top_p[lane], min_p[lane]
        picked = _draw(scaled, counter, limits if truncate_rows else None)
        greedy[random_rows] = picked
        if cuts is not None and truncate_rows:
            cuts[random_rows] = _cuts(scaled, *limits)
    return torch.where(best.isnan(), -1, greedy).int()


def _cuts(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns the cuts of rows, int32 [N, 2]; see `sample`."""
    kept = truncate.top_k_top_p(truncate.min_p(logits, min_p), top_k, top_p)
    low = kept.masked_fill(kept == -torch.inf, torch.inf).amin(dim=-1)
    entry = torch.arange(kept.shape[1], device=kept.device)
    last = torch.where(kept == low.unsqueeze(1), entry, -1).amax(dim=-1)
    return torch.stack([low.view(torch.int32), last.int()], dim=1)


Counter = tuple[Tensor, Tensor, Tensor]
"""seed int32 [N, 2], sample index int32 [N], position int32 [N]."""


def _draw(logits: Tensor, counter: Counter, cuts: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """Returns tokens, int64 [N], of rows with a temperature, by which `logits` are divided."""
    if cuts is None:
        return _perturbed(logits, counter)
    top_k, top_p, min_p = cuts
    if bool((min_p > 0).any()):
        logits = truncate.min_p(logits, min_p)
    cut = (top_k > 0) | (top_p < 1.0)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    some, others = torch.nonzero(cut).flatten(), torch.nonzero(~cut).flatten()
    if len(some):
        own = _select(counter, some)
        tokens[some], sure = truncate.pick_likely(
            logits[some], top_k[some], top_p[some], lambda entries: random.gumbel_at(*own, entries)
        )
        wide = some[~sure]
        if len(wide):
            kept = truncate.top_k_top_p(logits[wide], top_k[wide], top_p[wide])
            tokens[wide] = _perturbed(kept, _select(counter, wide))
    if len(others):
        tokens[others] = _perturbed(logits[others], _select(counter, others))
    return tokens


def _select(counter: Counter, rows: Tensor) -> Counter:
    seed, index, position = counter
    return seed[rows], index[rows], position[rows]


def _perturbed(logits: Tensor, counter: Counter) -> Tensor:
    """Returns the place of each row's largest logit plus noise, int64 [N]."""
    return random.gumbel(*counter, logits.shape[-1]).add_(logits).argmax(dim=-1)


def finish_rows(
    rows: StepRows,
    logit_rows: LogitRows,
    sampled: Tensor,
    results: Tensor,
    *,
    position: Tensor,
    tokens: Tensor,
    max_total: Tensor,
    min_total: Tensor,
    num_stops: Tensor,
    stops: Tensor,
    counts: Tensor | None = None,
    ring: ResultRing | None = None,
) -> None:
    """Accepts sampled tokens, advances lanes past the computed tokens, and records why rows end.

    A row with drafts accepts the longest prefix on which drafts and samples agree, and the sample
    after it. Tokens after one that ends the row are dropped.

    Args:
        sampled: int32 [L].
        results: int32 [R, 2 + K]: the number of a row's tokens, why it ends, and the tokens, then
            -1. A row whose lane is held gives no token, and its reason is LATE. Lines of padding
            are undefined.
        position: int32 [M]; the position of a lane that ends becomes `ENDED`.
        tokens: int32 [M, max_len]; gets the accepted tokens.
        max_total, min_total, num_stops: int32 [M].
        stops: int32 [M, S].
        counts: int32 [M, vocab], or None. Each accepted token's entry grows by 2.
        ring: gets a copy of the results in its current slot, if given.
    """
    count = (rows.logit_start[1:] - rows.logit_start[:-1]).long()
    results[: len(count)].fill_(-1)
    results[: len(count), :FIRST_TOKEN] = 0
    active = torch.nonzero((rows.lanes >= 0) & (count > 0)).flatten()
    results[active, 1] = _late(rows, logit_rows, active, position)
    index = 0
    while len(active):
        place = rows.logit_start[active].long() + index
        active, place = _present(active, place, logit_rows)
        if not len(active):
            break
        lane, token = rows.lanes[active].long(), sampled[place]
        length = logit_rows.lengths[place]
        reason = _reason(token, length + 1, lane, max_total, min_total, num_stops, stops)
        whole = token >= 0
        at = length.long().clamp(max=tokens.shape[1] - 1)
        agreed = tokens[lane, at] == token
        results[active, 1] = reason
        active, lane, token, length = (x[whole] for x in (active, lane, token, length))
        results[active, FIRST_TOKEN + index] = token
        results[active, 0] = index + 1
        tokens[lane, at[whole]] = token
        position[lane] = length
        position[lane[reason[whole] > 0]] = ENDED
        if counts is not None:
            counts[lane, token.long()] += 2
        index += 1
        active = active[(agreed & (reason == 0))[whole] & (count[active] > index)]
    if ring is not None:
        ring.lines[int(ring.turn), : len(count)] = results[: len(count)]


def sample_and_finish(
    logits: Tensor,
    rows: StepRows,
    logit_rows: LogitRows,
    results: Tensor,
    *,
    sampling: Mapping[str, Tensor],
    position: Tensor,
    tokens: Tensor,
    max_total: Tensor,
    min_total: Tensor,
    num_stops: Tensor,
    stops: Tensor,
    ring: ResultRing | None = None,
) -> None:
    """Draws tokens for rows without truncation, and accepts them: `sample`, then `finish_rows`.

    Args:
        logits: [L, vocab].
        sampling: arguments of `sample` by name.
    """
    drawn = sample(logits, logit_rows.lanes, logit_rows.lengths, **sampling, truncate_rows=False)
    finish_rows(
        rows,
        logit_rows,
        drawn,
        results,
        position=position,
        tokens=tokens,
        max_total=max_total,
        min_total=min_total,
        num_stops=num_stops,
        stops=stops,
        ring=ring,
    )


def _late(rows: StepRows, logit_rows: LogitRows, active: Tensor, position: Tensor) -> Tensor:
    """Returns LATE for rows whose lane is held and that have no logit row, else 0: int32 [n]."""
    held = position[rows.lanes[active].long()] <= _FIRST_HELD
    absent = logit_rows.lanes[rows.logit_start[active].long()] < 0
    return (held & absent).int() * LATE


def _present(active: Tensor, place: Tensor, logit_rows: LogitRows) -> tuple[Tensor, Tensor]:
    """Returns the rows that have a logit row at `place`."""
    real = logit_rows.lanes[place] >= 0
    return (active, place) if bool(real.all()) else (active[real], place[real])


def _reason(
    token: Tensor,
    total: Tensor,
    lane: Tensor,
    max_total: Tensor,
    min_total: Tensor,
    num_stops: Tensor,
    stops: Tensor,
) -> Tensor:
    """Returns the reason for which a row of `total` tokens ends with this token, int32 [n], 0 if it
    continues."""
    reason = (total >= max_total[lane]).int() * LENGTH
    most = int(num_stops[lane].max())
    if most:
        column = torch.arange(most, device=token.device)
        ends = (stops[lane, :most] == token.unsqueeze(1)) & (column < num_stops[lane].unsqueeze(1))
        hit = ends.any(dim=1) & (total > min_total[lane])
        reason = torch.where(hit, STOP_TOKEN, reason)
    return torch.where(token < 0, BROKEN, reason).int()


def token_logprobs(
    logits: Tensor,
    rows: LogitRows,
    tokens: Tensor,
    wanted: Tensor,
    out: Tensor,
    processed: ProcessedLogits | None = None,
) -> None:
    """Writes log-probabilities of tokens int32 [L] and of their likeliest alternatives.

    Args:
        logits: [L, vocab], before penalties and masks.
        wanted: int32 [M], number of alternatives for a lane, -1 for no log-probabilities.
        out: int32 [at least L, 2 + 2 (1 + W)], output. Lines of rows without log-probabilities are
            not written.
            A line has the token's position, its rank (1 is the likeliest), 1 + W ids and the
            float32 bits of their log-probabilities. The first id is the token's. The alternatives
            follow, the likeliest first, ties by id. Entries past the wanted number are undefined.
        processed: gives each row's values by the mode of its lane. Then alternatives that cannot be
            drawn have the id -1. None: all values are log-probabilities of `logits`.
    """
    own = rows.lanes.long().clamp(min=0)
    asked = torch.nonzero((rows.lanes >= 0) & (wanted[own] >= 0)).flatten()
    if not len(asked):
        return
    raw = logits[asked].float()
    if processed is not None:
        raw = _of_modes(raw, asked, own[asked], processed)
        processed.sizes[asked] = (raw > -torch.inf).sum(dim=-1, dtype=torch.int32)
    values = raw.log_softmax(dim=-1)
    if processed is not None:
        as_logits = (processed.modes[own[asked]] & LOGITS) > 0
        values = torch.where(as_logits.unsqueeze(1), raw, values)
    chosen = tokens[asked].long().clamp(min=0).unsqueeze(1)
    mine = values.gather(1, chosen)
    slots = (out.shape[1] - 2) // 2
    width = min(int(wanted[own[asked]].max()), values.shape[1], slots - 1)
    ids = _ranked(raw).topk(width, dim=-1).indices
    best = values.gather(1, ids)
    if processed is not None:
        ids = ids.masked_fill(raw.gather(1, ids) == -torch.inf, -1)
    line = out[asked]
    line[:, 0] = rows.lengths[asked]
    line[:, 1] = (raw > raw.gather(1, chosen)).sum(dim=-1, dtype=torch.int32) + 1
    line[:, 2 : 3 + width] = torch.cat([chosen, ids], dim=1).int()
    line[:, 2 + slots : 3 + slots + width] = torch.cat([mine, best], dim=1).view(torch.int32)
    out[asked] = line


def _of_modes(raw: Tensor, asked: Tensor, lanes: Tensor, processed: ProcessedLogits) -> Tensor:
    """Returns the logits of each row's mode, float32 [N, vocab]. Tokens that cannot be drawn have
    -inf.

    Args:
        raw: float32 [N, vocab], the model's logits.
        asked: int64 [N], places of the rows.
        lanes: int64 [N].
    """
    changed = ((processed.modes[lanes] & PROCESSED) > 0).unsqueeze(1)
    given = processed.temperature[lanes].unsqueeze(1)
    random_rows = changed & (given > 0)
    x = torch.where(changed, processed.logits[asked].float(), raw)
    x = x / torch.where(random_rows, given, 1.0)
    low, last = processed.cuts[asked].unsqueeze(2).unbind(1)
    low = low.contiguous().view(torch.float32)
    entry = torch.arange(x.shape[1], device=x.device)
    kept = (x > low) | ((x == low) & (entry <= last))
    return x.masked_fill(random_rows & ~kept, -torch.inf)


def _ranked(x: Tensor) -> Tensor:
    """Returns int64 keys that sort in the order of x, float32 [n, vocab]. If entries are equal, the
    first one has the largest key."""
    bits = x.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) - torch.arange(x.shape[1], device=x.device)
