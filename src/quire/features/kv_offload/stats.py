"""The statistics of the lower tiers."""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct):
    """Counts since the start.

    In the attributes from `host_evictions` on, a recurrent state counts as a block.

    Attributes:
        host_blocks_total: KV blocks that the host has room for.
        host_blocks_used: KV blocks on the host at present.
        disk_blocks: KV blocks in files at present.
        host_states_total: Recurrent states that the host has room for.
        host_states_used: Recurrent states on the host at present.
        disk_states: Recurrent states in files at present.
        host_hit_tokens: Tokens of requests whose KV came from the host.
        disk_hit_tokens: Tokens of requests whose KV came from files.
        host_evictions: Blocks that the host's pool gave up.
        disk_writes: Blocks written to files.
        swapped_out: Blocks copied to the host.
        swapped_in: Blocks copied back to the device.
        swapped_out_bytes: Bytes copied to the host.
        swapped_in_bytes: Bytes copied back to the device.
        transfer_failures: Failed transfers of any kind.
        prefill_rate: Tokens per second, measured at the start (`Rates`).
        out_rate: Bytes per second to the host, measured at the start.
        in_rate: Bytes per second to the device, measured at the start.
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


LIVE_ROWS = {
    "host_blocks_total": "Blocks of host memory",
    "host_blocks_used": "Blocks of host memory in use",
    "disk_blocks": "Blocks in files",
    "host_hit_tokens": "Tokens from host memory",
    "disk_hit_tokens": "Tokens from files",
    "host_evictions": "Blocks that host memory gave up",
    "disk_writes": "Blocks written to files",
    "swapped_out": "Blocks copied out",
    "swapped_in": "Blocks copied in",
    "swapped_out_bytes": "Bytes copied out",
    "swapped_in_bytes": "Bytes copied in",
    "transfer_failures": "Transfers that failed",
    "prefill_rate": "Prompt tokens a second, measured",
    "out_rate": "Bytes a second out, measured",
    "in_rate": "Bytes a second in, measured",
}
"""The names of the statistics in the live view."""
