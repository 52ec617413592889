"""Three exercises on rounding.

python -m lessons check 11
"""

from __future__ import annotations

from torch import Tensor


def pack(values: Tensor) -> Tensor:
    """Returns 4-bit values two to a byte, uint8 [rows, inputs / 2].

    values: int [rows, inputs] from 0 to 15, of an even count of inputs. Of each pair the first is
    in the low half of the byte.
    """
    raise NotImplementedError


def with_zero(x: Tensor, bits: int) -> Tensor:
    """Rounds each row to 2^bits evenly spaced steps from its least value to its greatest, and back.

    x: float [rows, inputs]. The least and greatest value of a row stay what they are, up to
    rounding errors of float32; a row of equal values stays as it is.
    """
    raise NotImplementedError


def smoothing(inputs: Tensor, weight: Tensor, strength: float) -> Tensor:
    """Returns SmoothQuant's factors, float [inputs], by which inputs are divided and the weight's
    columns multiplied.

    inputs: the greatest magnitude of each input channel. weight: [outputs, inputs]. A factor is
    inputs^strength / (greatest magnitude of the weight's column)^(1 - strength), and 1 where either
    magnitude is 0.
    """
    raise NotImplementedError
