"""The split of a parameter over tensor-parallel ranks: models declare it, loaders read it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """`dim` is the axis that ranks split evenly, or None where every rank holds the whole.

    `unit` is the smallest piece that may not be cut (a head's width, say). Where there are fewer
    units than ranks, as with few KV heads, neighbouring ranks hold copies of one unit.
    `padded`: sizes that do not divide evenly are fine, the last ranks hold less (a vocabulary).
    """

    dim: int | None = None
    unit: int = 1
    padded: bool = False

    def bounds(
        self, size: int, rank: int, world: int, name: str = "a parameter"
    ) -> tuple[int, int]:
        """The half-open range of the `size` entries along `dim` that `rank` of `world` holds. name:
        what an error calls the entries."""
        if self.dim is None or world == 1:
            return 0, size
        if self.padded:
            each = -(-size // world)
            return min(rank * each, size), min((rank + 1) * each, size)
        units = size // self.unit
        if size % self.unit or (units % world if units >= world else world % units):
            cut = f" units of {self.unit}" if self.unit > 1 else ""
            fitting = ", ".join(str(count) for count in range(1, 65) if units % count == 0)
            raise ConfigError(
                f"{name}: {units}{cut} cannot be shared out evenly over {world} ranks; "
                f"tensor_parallel_size may be {fitting}",
                param="tensor_parallel_size",
            )
        if units >= world:
            each = units // world
            return rank * each * self.unit, (rank + 1) * each * self.unit
        unit = rank * units // world
        return unit * self.unit, (unit + 1) * self.unit


REPLICATED = ShardSpec()
