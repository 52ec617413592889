"""The split of a parameter over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The split of one parameter.

    Attributes:
        dim: the axis that ranks split evenly, or None if every rank holds the whole.
        unit: entries that stay on one rank, such as a head's width. With fewer units than ranks, as
            with few KV heads, neighbouring ranks hold copies of one unit.
        padded: the size need not divide evenly, and the last ranks hold fewer entries. Used for
            vocabularies.
    """

    dim: int | None = None
    unit: int = 1
    padded: bool = False

    def bounds(
        self, size: int, rank: int, world: int, name: str = "a parameter"
    ) -> tuple[int, int]:
        """Returns [first, end) of the entries along `dim` that a rank holds.

        Args:
            size: entries along `dim`.
            rank: number of the rank, from 0.
            world: number of ranks.
            name: name of the entries in error messages.

        Raises:
            ConfigError: the units cannot be split evenly.
        """
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
                f"{name}: {units}{cut} cannot be split evenly over {world} ranks; "
                f"tensor_parallel_size may be {fitting}",
                param="tensor_parallel_size",
            )
        if units >= world:
            each = units // world
            return rank * each * self.unit, (rank + 1) * each * self.unit
        unit = rank * units // world
        return unit * self.unit, (unit + 1) * self.unit


REPLICATED = ShardSpec()
