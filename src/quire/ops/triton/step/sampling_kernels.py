"""Kernels of `sampling.py`: one scan of the vocabulary in tiles, then one program per row.

The scan stores each tile's largest logit plus noise. For rows with truncation it also stores the
maximum of every stretch of `SUB` entries. The k-th largest of these maxima is a lower bound of the
k-th largest logit. So the second kernel reads only the few stretches with a larger maximum, and
sorts their entries.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.step.random import gumbel_at, gumbel_quads

SUB = tl.constexpr(128)
INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(x):
    """Returns int32 keys that sort in the order of x, fp32. `_value` is the inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scan(
    logits_ptr, lanes_ptr, position_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    sample_ptr, best_ptr, entry_ptr, peaks_ptr, sums_ptr, vocab, logits_stride, float_stride,
    int_stride, draw,
    TILE: tl.constexpr, TRUNCATE: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scans a tile of a row's logits. Grid: (rows, tiles). A temperature of 0 is greedy."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if PDL:
        gdc_wait()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    temperature = tl.load(temperature_ptr + lane * float_stride)
    quads = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    entry = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = logits_ptr + row * logits_stride + entry
    logits = tl.load(at, mask=entry < vocab, other=float("-inf")).to(tl.float32)
    score = logits
    if temperature > 0.0:
        logits = logits / temperature
        position = tl.load(position_ptr + row)
        sample = tl.load(sample_ptr + lane * int_stride)
        low = tl.load(seed_ptr + lane * int_stride)
        high = tl.load(seed_ptr + lane * int_stride + 1)
        noise = gumbel_quads(quads, position, sample, draw, low, high, FAST)
        score = logits + noise
        if TRUNCATE:
            subs: tl.constexpr = TILE // SUB
            peaks = tl.max(tl.reshape(logits, [subs, SUB]), 1)
            at_sub = (row * tl.num_programs(1) + tile) * subs + tl.arange(0, subs)
            tl.store(peaks_ptr + at_sub, peaks)
            peak = tl.max(peaks, 0)
            base = tl.where(peak == float("-inf"), 0.0, peak)
            tl.store(sums_ptr + row * tl.num_programs(1) + tile, tl.sum(tl.exp(logits - base)))
    # Places past the vocabulary must not win, even if all logits are -inf. If a logit is NaN, entry
    # -1 wins and says so.
    broken = tl.max(tl.max((logits != logits).to(tl.int32), 1), 0) > 0
    best = tl.max(tl.max(score, 1), 0)
    places = tl.where((score == best) & (entry < vocab), entry, INT_MAX)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, tl.where(broken, float("inf"), best))
    tl.store(entry_ptr + out, tl.where(broken, -1, tl.min(tl.min(places, 1), 0)))


@triton.jit
def _likeliest(keys, count):
    """Returns the `count`-th largest of int32 keys (1 is the largest), by bisection of the bits."""
    low = tl.min(keys, 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys.to(tl.int64) >= middle).to(tl.int32), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _above(logits, vocab, temperature, floor, threshold, peak, BLOCK: tl.constexpr):
    """Returns the number of a row's entries at or above both `floor` and `threshold`, and the sum
    of their probabilities relative to the peak's."""
    count = 0
    mass = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temperature
        kept = (x >= floor) & (x >= threshold) & (at < vocab)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(x - peak), 0.0), 0)
    return count, mass


@triton.jit
def _pick_by_scan(
    logits, vocab, temperature, floor, top_k, top_p, peak, lowest, position, sample, draw, low_seed,
    high_seed, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draws a token of a row that has too many likely entries to collect. Returns it, and the
    lowest kept value.

    It bisects thresholds, and reads the row once for each. All entries tied at a threshold are
    kept."""
    first = _ordered(lowest).to(tl.int64)
    last = _ordered(peak).to(tl.int64)
    if top_k > 0:
        low = first
        high = last
        while low < high:
            middle = low + (high - low + 1) // 2
            bound = _value(middle.to(tl.int32))
            count, _ = _above(logits, vocab, temperature, floor, bound, peak, BLOCK)
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle - 1)
        first = low
    if top_p < 1.0:
        bound = _value(first.to(tl.int32))
        _, whole = _above(logits, vocab, temperature, floor, bound, peak, BLOCK)
        low = first
        high = last
        while low < high:
            middle = low + (high - low + 1) // 2
            bound = _value(middle.to(tl.int32))
            _, mass = _above(logits, vocab, temperature, floor, bound, peak, BLOCK)
            low = tl.where(mass >= top_p * whole, middle, low)
            high = tl.where(mass >= top_p * whole, high, middle - 1)
        first = low
    bound = tl.maximum(_value(first.to(tl.int32)), floor)
    best = float("-inf")
    token = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temperature
        noise = gumbel_at(at, position, sample, draw, low_seed, high_seed, FAST)
        score = tl.where((x >= bound) & (at < vocab), x + noise, float("-inf"))
        here = tl.max(score, 0)
        place = tl.min(tl.where(score == here, at, INT_MAX), 0)
        token = tl.where(here > best, place, token)
        best = tl.maximum(here, best)
    return token, bound


@triton.jit
def _collect(
    logits, vocab, temperature, bound, hit, stretch, found,
    SUBS_PAD: tl.constexpr, CAP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Collects a row's entries at or above `bound` in `found`, and returns their number.

    Only the stretches `hit` are read. Entries past CAP are counted but not stored."""
    order = tl.cumsum(hit.to(tl.int32), 0) - 1
    num_hits = tl.sum(hit.to(tl.int32), 0)
    tl.store(stretch + order, tl.arange(0, SUBS_PAD), mask=hit)
    tl.debug_barrier()
    count = 0
    for start in range(0, num_hits, AT_ONCE):
        listed = start + tl.arange(0, AT_ONCE)
        which = tl.load(stretch + listed, mask=listed < num_hits, other=0)
        entry = which[:, None] * SUB + tl.arange(0, SUB)[None, :]
        inside = (listed < num_hits)[:, None] & (entry < vocab)
        x = tl.load(logits + entry, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        kept = inside & (x >= bound)
        flat = tl.reshape(kept.to(tl.int32), [AT_ONCE * SUB])
        place = tl.reshape(tl.cumsum(flat, 0), [AT_ONCE, SUB]) - 1 + count
        # The high word is the value and the low word the complement of the entry, so keys sort by
        # value, then by entry.
        packed = (_ordered(x).to(tl.int64) << 32) | (-entry + INT_MAX).to(tl.int64)
        tl.store(found + place, packed, mask=kept & (place < CAP))
        count += tl.sum(flat, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _whole_mass(
    peaks, sums, num_subs, num_tiles, peak, TILES_PAD: tl.constexpr, TILE: tl.constexpr
):
    """Returns the sum of a row's probabilities relative to the peak's, from the scan's sums."""
    per_tile: tl.constexpr = TILE // SUB
    tiles = tl.arange(0, TILES_PAD)
    subs = tiles[:, None] * per_tile + tl.arange(0, per_tile)[None, :]
    tops = tl.max(tl.load(peaks + subs, mask=subs < num_subs, other=float("-inf")), 1)
    here = tl.load(sums + tiles, mask=tiles < num_tiles, other=0.0)
    return tl.sum(here * tl.exp(tops - peak), 0)


@triton.jit
def _pick_cut(
    logits, vocab, temperature, top_k, top_p, min_p, peaks_at, sums_at, stretch, found, num_tiles,
    num_subs, position, sample, draw, low_seed, high_seed,
    TILES_PAD: tl.constexpr, SUBS_PAD: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    AT_ONCE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draws the token of a row with truncation. Returns it, the lowest kept value, and the last
    kept entry of that value.

    It collects the likely entries, sorts them, truncates them, and draws from the rest."""
    subs = tl.arange(0, SUBS_PAD)
    peaks = tl.load(peaks_at + subs, mask=subs < num_subs, other=float("-inf"))
    peak = tl.max(peaks, 0)
    floor = float("-inf")
    if min_p > 0.0:
        floor = peak + tl.log(min_p)
    wanted = tl.where((top_k > 0) & (top_k < CAP // 4), top_k, CAP // 4)
    bound = tl.maximum(_value(_likeliest(_ordered(peaks), wanted)), floor)
    hit = (peaks >= bound) & (subs < num_subs)
    count = _collect(logits, vocab, temperature, bound, hit, stretch, found, SUBS_PAD, CAP, AT_ONCE)

    rank = tl.arange(0, CAP)
    held = rank < count
    packed = tl.sort(tl.load(found + rank, mask=held, other=-(2**63)), descending=True)
    x = tl.where(held, _value((packed >> 32).to(tl.int32)), float("-inf"))
    kept = held
    if top_k > 0:
        last = tl.minimum(top_k, count) - 1
        kept = kept & (x >= tl.sum(tl.where(rank == last, x, 0.0), 0))
    mass = tl.where(kept, tl.exp(x - peak), 0.0)
    whole = tl.sum(mass, 0)
    # The probabilities of entries that were not collected count as well, unless top-k or min-p
    # drops these entries.
    settled = (bound <= floor) | ((top_k > 0) & (top_k <= wanted))
    if not settled:
        everything = _whole_mass(peaks_at, sums_at, num_subs, num_tiles, peak, TILES_PAD, TILE)
        only_top_p = (top_k <= 0) & (min_p <= 0.0) & (top_p < 1.0)
        settled = only_top_p & (whole >= top_p * everything)
        whole = everything
    winner = 0
    low = float("-inf")
    last = INT_MAX
    if settled & (count <= CAP):
        before = tl.cumsum(mass, 0) - mass
        reach = tl.where(top_p < 1.0, top_p * whole, float("inf"))
        kept = kept & ((before < reach) | (rank == 0))
        entry = -(packed & 0x7FFFFFFF).to(tl.int32) + INT_MAX
        noise = gumbel_at(entry, position, sample, draw, low_seed, high_seed, FAST)
        score = tl.where(kept, x + noise, float("-inf"))
        winner = tl.min(tl.where(score == tl.max(score, 0), entry, INT_MAX), 0)
        # The kept entries are the first ones of the sorted entries.
        ends = rank == tl.sum(kept.to(tl.int32), 0) - 1
        low = tl.sum(tl.where(ends, x, 0.0), 0)
        last = tl.sum(tl.where(ends, entry, 0), 0)
    else:
        lowest = tl.maximum(floor, -3.0e38)
        winner, low = _pick_by_scan(
            logits, vocab, temperature, floor, top_k, top_p, peak, lowest, position, sample, draw,
            low_seed, high_seed, AT_ONCE * SUB, FAST,
        )  # fmt: skip
    return winner, low, last


@triton.jit
def best_entry(best, entries, num_tiles, TILES_PAD: tl.constexpr):
    """Returns the best entry of a row from the scan's results; -1 if a logit was not a number."""
    tiles = tl.arange(0, TILES_PAD)
    real = tiles < num_tiles
    entry = tl.load(entries + tiles, mask=real, other=INT_MAX)
    score = tl.load(best + tiles, mask=real, other=float("-inf"))
    return tl.min(tl.where(score == tl.max(score, 0), entry, INT_MAX), 0)


@triton.jit
def _store_cut(cuts, row, low, last):
    tl.store((cuts + 2 * row).to(tl.pointer_type(tl.float32)), low)
    tl.store(cuts + 2 * row + 1, last)


@triton.jit
def pick(
    logits_ptr, lanes_ptr, position_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    sample_ptr, best_ptr, entry_ptr, peaks_ptr, sums_ptr, stretch_ptr, found_ptr, tokens_ptr,
    cuts_ptr, vocab, logits_stride, float_stride, int_stride, draw, num_tiles, num_subs,
    TILES_PAD: tl.constexpr, SUBS_PAD: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    AT_ONCE: tl.constexpr, TRUNCATE: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Picks the token of a row. Grid: (rows). Rows without truncation take the scan's best. Unless
    `cuts_ptr` is None, it stores the cut of every row."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    temperature = tl.load(temperature_ptr + lane * float_stride)
    tiles = tl.arange(0, TILES_PAD)
    real = tiles < num_tiles
    cut = False
    if TRUNCATE:
        top_k = tl.load(top_k_ptr + lane * int_stride)
        top_p = tl.load(top_p_ptr + lane * float_stride)
        min_p = tl.load(min_p_ptr + lane * float_stride)
        cut = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    entry = tl.load(entry_ptr + row * num_tiles + tiles, mask=real, other=INT_MAX)
    broken = tl.min(entry, 0) < 0
    if broken | (not cut):
        best = tl.load(best_ptr + row * num_tiles + tiles, mask=real, other=float("-inf"))
        winner = tl.min(tl.where(best == tl.max(best, 0), entry, INT_MAX), 0)
        tl.store(tokens_ptr + row, winner)
        if cuts_ptr is not None:
            _store_cut(cuts_ptr, row, float("-inf"), INT_MAX)
    if TRUNCATE:
        if cut & (not broken):
            winner, low, last = _pick_cut(
                logits_ptr + row * logits_stride, vocab, temperature, top_k, top_p, min_p,
                peaks_ptr + row * num_subs, sums_ptr + row * num_tiles,
                stretch_ptr + row * num_subs, found_ptr + row * CAP, num_tiles, num_subs,
                tl.load(position_ptr + row), tl.load(sample_ptr + lane * int_stride), draw,
                tl.load(seed_ptr + lane * int_stride), tl.load(seed_ptr + lane * int_stride + 1),
                TILES_PAD, SUBS_PAD, TILE, CAP, AT_ONCE, FAST,
            )  # fmt: skip
            tl.store(tokens_ptr + row, winner)
            if cuts_ptr is not None:
                _store_cut(cuts_ptr, row, low, last)


@triton.jit
def _is_kept(x, entry, low, last):
    return (x > low) | ((x == low) & (entry <= last))


@triton.jit
def _distribution(
    logits, processed_ptr, modes_ptr, temperature_ptr, cuts_ptr, row, lane, processed_stride,
    float_stride,
):  # fmt: skip
    """Returns the logits of a row's mode, their temperature, and the cut of the mode: the lowest
    kept value, and the last kept entry of that value. See `ProcessedLogits`."""
    temperature = 1.0
    low = float("-inf")
    last = INT_MAX
    if tl.load(modes_ptr + lane) & 1:
        logits = processed_ptr + row * processed_stride
        given = tl.load(temperature_ptr + lane * float_stride)
        if given > 0.0:
            temperature = given
            low = tl.load((cuts_ptr + 2 * row).to(tl.pointer_type(tl.float32)))
            last = tl.load(cuts_ptr + 2 * row + 1)
    return logits, temperature, low, last


@triton.jit
def logprob_tiles(
    logits_ptr, lanes_ptr, tokens_ptr, wanted_ptr, peaks_ptr, sums_ptr, above_ptr, processed_ptr,
    modes_ptr, temperature_ptr, cuts_ptr, kept_ptr, vocab, logits_stride, processed_stride,
    float_stride, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scans a tile of a row that asks for log-probabilities. Grid: (rows, tiles).

    It stores the maximum of every `SUB` entries. For the tile it stores the sum of probabilities
    relative to the tile's maximum, and the number of entries above the row's token. With
    `processed_ptr` rows have modes, and the number of kept entries is stored too."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    if tl.load(wanted_ptr + lane) < 0:
        return
    token = tl.maximum(tl.load(tokens_ptr + row), 0)
    entry = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row_at = logits_ptr + row * logits_stride
    if processed_ptr is not None:
        row_at, temperature, low, last = _distribution(
            row_at, processed_ptr, modes_ptr, temperature_ptr, cuts_ptr, row, lane,
            processed_stride, float_stride,
        )  # fmt: skip
    x = tl.load(row_at + entry, mask=entry < vocab, other=float("-inf")).to(tl.float32)
    own = tl.load(row_at + token).to(tl.float32)
    if processed_ptr is not None:
        x = x / temperature
        own = own / temperature
        x = tl.where(_is_kept(x, entry, low, last), x, float("-inf"))
    subs: tl.constexpr = TILE // SUB
    peaks = tl.max(tl.reshape(x, [subs, SUB]), 1)
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks_ptr + out * subs + tl.arange(0, subs), peaks)
    tl.store(sums_ptr + out, tl.sum(tl.exp(x - base), 0))
    tl.store(above_ptr + out, tl.sum((x > own).to(tl.int32), 0))
    if processed_ptr is not None:
        tl.store(kept_ptr + out, tl.sum((x > float("-inf")).to(tl.int32), 0))


@triton.jit
def _next_likely(logits, vocab, value, entry, temperature, BLOCK: tl.constexpr):
    """Returns the value and the index of the row's likeliest entry after (value, entry).

    Ties are ordered by index. A temperature of None is 1."""
    best = float("-inf")
    place = INT_MAX
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        if temperature is not None:
            x = x / temperature
        behind = (at < vocab) & ((x < value) | ((x == value) & (at > entry)))
        x = tl.where(behind, x, float("-inf"))
        here = tl.max(x, 0)
        first = tl.min(tl.where(behind & (x == here), at, INT_MAX), 0)
        better = (here > best) | ((here == best) & (first < place))
        place = tl.where(better, first, place)
        best = tl.where(better, here, best)
    return best, place


@triton.jit
def logprob_rows(
    logits_ptr, lanes_ptr, lengths_ptr, tokens_ptr, wanted_ptr, peaks_ptr, sums_ptr, above_ptr,
    stretch_ptr, found_ptr, out_ptr, processed_ptr, modes_ptr, temperature_ptr, cuts_ptr, kept_ptr,
    sizes_ptr, vocab, logits_stride, processed_stride, float_stride, out_stride, slots, num_tiles,
    num_subs,
    TILES_PAD: tl.constexpr, SUBS_PAD: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the log-probabilities of a row. Grid: (rows).

    It adds the tiles' sums (online log-sum-exp, Milakov & Gimelshein, 2018), then collects and
    sorts the likeliest entries. Unless `processed_ptr` is None, rows have modes."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    wanted = tl.load(wanted_ptr + lane)
    if wanted < 0:
        return
    wanted = tl.minimum(tl.minimum(wanted, slots - 1), vocab)
    logits = logits_ptr + row * logits_stride
    subs = tl.arange(0, SUBS_PAD)
    peaks_at = peaks_ptr + row * num_subs
    peaks = tl.load(peaks_at + subs, mask=subs < num_subs, other=float("-inf"))
    peak = tl.max(peaks, 0)
    whole = _whole_mass(peaks_at, sums_ptr + row * num_tiles, num_subs, num_tiles, peak,
                        TILES_PAD, TILE)  # fmt: skip
    norm = peak + tl.log(whole)
    token = tl.maximum(tl.load(tokens_ptr + row), 0)
    if processed_ptr is not None:
        logits, scale, low, last = _distribution(
            logits, processed_ptr, modes_ptr, temperature_ptr, cuts_ptr, row, lane,
            processed_stride, float_stride,
        )  # fmt: skip
    else:
        scale = 1.0
    own = tl.load(logits + token).to(tl.float32)
    tiles = tl.arange(0, TILES_PAD)
    above = tl.load(above_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    line = out_ptr + row * out_stride
    ids = line + 2
    values = (line + 2 + slots).to(tl.pointer_type(tl.float32))
    if processed_ptr is not None:
        kept = tl.load(kept_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
        size = tl.sum(kept, 0)
        tl.store(sizes_ptr + row, size)
        # Entries past the kept ones have no id. The caller has asked for them all the same.
        tl.store(ids + 1 + tl.arange(0, CAP), -1, mask=tl.arange(0, CAP) < wanted)
        wanted = tl.minimum(wanted, size)
        if tl.load(modes_ptr + lane) & 2:
            norm = 0.0
        own = own / scale
        own = tl.where(_is_kept(own, token, low, last), own, float("-inf"))
    tl.store(line, tl.load(lengths_ptr + row))
    tl.store(line + 1, tl.sum(above, 0) + 1)
    tl.store(ids, token)
    tl.store(values, own - norm)
    if wanted > 0:
        bound = float("-inf")
        if wanted <= num_subs:
            bound = _value(_likeliest(_ordered(peaks), wanted))
        if processed_ptr is not None:
            # Fewer stretches than wanted may have kept entries.
            bound = tl.maximum(bound, low)
        hit = (peaks >= bound) & (subs < num_subs)
        found = found_ptr + row * CAP
        count = _collect(
            logits, vocab, scale, bound, hit, stretch_ptr + row * num_subs, found, SUBS_PAD, CAP,
            AT_ONCE,
        )  # fmt: skip
        if count <= CAP:
            rank = tl.arange(0, CAP)
            held = rank < count
            packed = tl.load(found + rank, mask=held, other=-(2**63))
            packed = tl.sort(packed, descending=True)
            entry = -(packed & 0x7FFFFFFF).to(tl.int32) + INT_MAX
            asked = rank < wanted
            tl.store(ids + 1 + rank, entry, mask=asked)
            tl.store(values + 1 + rank, _value((packed >> 32).to(tl.int32)) - norm, mask=asked)
        else:
            value = float("inf")
            place = -1
            for i in range(0, wanted):
                value, place = _next_likely(
                    logits, vocab, value, place, scale if processed_ptr is not None else None, 1024
                )
                tl.store(ids + 1 + i, place)
                tl.store(values + 1 + i, value - norm)
