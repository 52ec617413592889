"""Products of tokens and weights: the kernels, their planner, its tables and the tuner.

`linear.py` picks a kernel by rows, weight bits and card: the first line of this table that fits.
`table.py` plans the layers that `small.py` runs, from a measured table or by rules.

| rows | weight | card | kernel |
| --- | --- | --- | --- |
| any, `--deterministic` | any | any | `skinny`, by a plan with one order of sums |
| 1 | 8-bit floats, scales per 128 inputs, for x too | sm_89+ | `block_gemv` |
| any | the same | Hopper | `hopper_blocks` |
| > 32 | 8 bits, x rounded to 8 bits | any | `eight_bit`; cuBLAS for many rows |
| 9 to 512 | 4 or 8 bits with scales | Hopper | `hopper_gemm` |
| 17 to 32, with residual | 16 bits | Hopper | `hopper_narrow` |
| up to 256 | any in a measured table | the table's card | the table's plan |
| 1 | 4 bits in groups of 128, or int8 | sm_90+ | `integer_gemv` |
| up to 8 | 4 or 8 bits; from 2 rows on, small 16-bit weights | sm_80+ | `mma_gemv` |
| up to 4; long 16-bit rows, up to 2 | any | any | `gemv` |
| up to 256 | 4 or 8 bits | any | `skinny` |
| up to 64 | 16 bits, except large weights | any | `skinny` |
| 2048 and more, gated | 16 bits | Hopper | `experts/hopper_gated` |
| other | any | any | cuBLAS |
"""
