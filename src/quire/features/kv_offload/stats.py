"""The statistics of the lower tiers."""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct):
    """Counted since the start, in blocks unless said otherwise.

    host_blocks_total, host_blocks_used, disk_blocks: of KV, as they are now; host_states_total,
    host_states_used, disk_states: recurrent states. The rest counts both. host_hit_tokens,
    disk_hit_tokens: tokens of requests that came from there. host_evictions: what the host's pool
    gave up. disk_writes: what of it went to files. swapped_out, swapped_in: copied to the host, and
    back. transfer_failures: transfers, of any kind. prefill_rate, out_rate, in_rate: tokens and
    bytes per second, as measured at the start (`Rates`).
    """

    host_blocks_total: int = 0
    host_blocks_used: int = 0
    disk_blocks: int = 0
    host_states_total: int = 0
    host_states_used: int = 0
    disk_states: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    host_evictions: int = 0
    disk_writes: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    transfer_failures: int = 0
    prefill_rate: float = 0.0
    out_rate: float = 0.0
    in_rate: float = 0.0
