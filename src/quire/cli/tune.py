"""`quire tune`: plans of a model's linear layers, measured and kept."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from quire.cli.help import ModelOptions, with_options
from quire.cli.info import config_alone
from quire.cli.progress import counted
from quire.engine.ranks.ranks import model_of_rank
from quire.errors import ConfigError, QuireError
from quire.models import load_config, model_quantization, spec_from_config
from quire.tools.bench.work import ceilings

if TYPE_CHECKING:
    from quire.ops.triton.products.plan import Shape


@with_options(ModelOptions)
def tune(
    *,
    model: ModelOptions,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=256,
            show_default=False,
            help="Rows of a step, rounded up to a power of two. May be repeated. Default: 1, 2, 4 "
            "and so on up to 256.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what the table already has.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
) -> None:
    """Measures a model's products that are not in the tables yet, and prints each.

    Raises:
        ConfigError: there is no such GPU, or the model cannot be shared out over so many ranks.
        ModelError: there is no such model.
        QuireError: another process measures for the same table, or it cannot be written.
    """
    where = _gpu(device)
    # Triton is missing on machines without a GPU.
    from quire.features.tuning.new_entries import make_entries, missing_shapes
    from quire.features.tuning.table_order import products_of
    from quire.ops.triton.products.measure import Measured, preferred
    from quire.ops.triton.products.plan import GemmPlan
    from quire.ops.triton.products.plans import sole_writer
    from quire.ops.triton.products.table import BUCKETS, PLANS, bucket, key_of

    engine = model.engine()
    config = config_alone(engine)
    hf_config = load_config(config.model_path)
    spec = spec_from_config(hf_config)
    quantization = model_quantization(config.model_path, hf_config, spec, engine.quantization)
    dtype = getattr(torch, config.dtype) if engine.dtype != "auto" else spec.dtype
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    rank = model_of_rank(spec, quantization, engine.tensor_parallel_size, dtype)
    sizes = sorted({bucket(m) or BUCKETS[-1] for m in rows or BUCKETS})
    products = products_of(rank, sizes)
    card = torch.cuda.get_device_name(where)
    wanted = products if again else missing_shapes(products, card)
    known = len(products) - len(wanted)
    typer.echo(f"{card}, {config.model_name}: {len(wanted)} products to measure, {known} are known")
    known_ceilings = ceilings(card, str(dtype).removeprefix("torch."))

    def report(shape: Shape, found: list[Measured[GemmPlan]]) -> None:
        best = preferred(found)
        if best is None:
            typer.echo(f"{key_of(shape):<52} no plan serves: {found[0].error}")
            return
        floor = "" if known_ceilings is None else _share(shape, best.us, known_ceilings.memory)
        plan = json.dumps(best.plan.as_json())
        typer.echo(f"{key_of(shape):<52} {found[0].us:8.1f} {best.us:8.1f} {floor:>6}  {plan}")

    if not wanted:
        return
    typer.echo("product, µs by rules of thumb, µs by the best plan, its share of the byte floor")
    free, _ = torch.cuda.mem_get_info(where)
    try:
        with sole_writer(PLANS.path(card)) as alone:
            if not alone:
                raise QuireError(f"another process measures plans for {PLANS.path(card)}")
            kept, left_out = make_entries(
                wanted, card, where, room=free, workers=os.cpu_count() or 1, report=report
            )
    except OSError as error:
        raise QuireError(f"plans cannot be kept: {error}") from error
    behind = f"; {left_out} products had no room in the GPU's memory" if left_out else ""
    typer.echo(f"{kept} plans are in {PLANS.path(card)}{behind}")


def _share(shape: Shape, us: float, bandwidth: float) -> str:
    return f"{100e6 * shape.weight_bytes / bandwidth / us:.0f} %"


def _gpu(device: str) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("quire tune needs a GPU: it measures kernels", "device")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known", "device") from error
    count = torch.cuda.device_count()
    if found.type != "cuda" or (found.index or 0) >= count:
        raise ConfigError(
            f"device {device!r} is not there: found {counted(count, 'GPU')}", "device"
        )
    return torch.device("cuda", found.index or 0)
