"""Updates of a loaded model's weights in place, by the loader's own mapping of names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.layers.linear import Linear
from quire.layers.parameter_slice import Loadable
from quire.models.config import family_named
from quire.models.decoder import Decoder, DecoderLayers
from quire.models.families.family import Family
from quire.models.files import first_few
from quire.models.kv_scales import is_scale
from quire.models.prepack import prepack_layer, unpack_layer
from quire.models.sanity import check_weights
from quire.models.tensor_file import TensorFile
from quire.models.weights import (
    READERS,
    StoredTensor,
    check_tensors,
    check_tied,
    fill,
    in_layout,
    is_tied,
    load_weights,
    places_of,
)


class WeightUpdate:
    """New values for some tensors of a model, checked against the model.

    Args:
        model: a loaded model.
        files: open files, or `TensorFile`s, with any of the checkpoint's tensors.
        family: names the tensors; None: the model's own family.
        whole: whether all of the checkpoint's tensors must be there.
        fixed_scales: whether the KV cache uses the checkpoint's scales, which cannot change.

    Attributes:
        names: the tensors' canonical names.
        nbytes: their bytes.

    Raises:
        ModelError: a tensor is unexpected, misshapen, of a wrong dtype or there twice, or must come
            together with others that are missing. Nothing was written.
    """

    def __init__(
        self,
        model: DecoderLayers,
        files: Sequence[Any],
        *,
        family: Family | None = None,
        whole: bool = False,
        fixed_scales: bool = False,
    ) -> None:
        family = family or family_named(model.spec.family)
        if family is None:
            raise ModelError(f"there is no family {model.spec.family!r}")
        if files:
            # A GGUF file names tensors after the model's parameters.
            family = getattr(files[0], "family_for", lambda model, own: own)(model, family)
        self.model, self.family = model, family
        self._places = places_of(model, family)
        self._found = check_tensors(
            files, self._places, family, tied=is_tied(model), partial=not whole
        )
        if not self._found:
            raise ModelError("an update needs at least one tensor of the model")
        self._modules = self._touched()
        self._check_complete()
        if fixed_scales:
            _refuse_scales(files, family)
        if not any(_is_announced(entry) for entry in self._found.values()):
            self._check_head()
        self.names = frozenset(self._found)
        self.nbytes = sum(entry.nbytes for entry in self._found.values())

    def _touched(self) -> dict[str, nn.Module]:
        """Returns the modules of which a tensor is updated, by name."""
        found: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            own = self._stored_names(name, module) if isinstance(module, Loadable) else set()
            if own & self._found.keys():
                found[name] = module
        head = getattr(self.model, "head", None)
        if isinstance(head, Linear) and head.tied and "embedding" in found:
            found["head"] = head
        return found

    def _stored_names(self, name: str, module: Loadable) -> set[str]:
        """Returns the canonical names of a module's tensors."""
        names = set()
        for part in module.slices():
            own = f"{name}.{part.name}" if name else part.name
            if own == "head.weight" and self.model.spec.tied_head:
                own = "embedding.weight"
            names.add(self.family.source(self.model.spec, own).name)
        return names

    def _check_complete(self) -> None:
        """Raises ModelError if a module misses tensors that must come together."""
        missing: list[str] = []
        for name, module in self._modules.items():
            if getattr(module, "updates_whole", False) and isinstance(module, Loadable):
                missing += sorted(self._stored_names(name, module) - self._found.keys())
        if missing:
            raise ModelError(
                "an update must bring all projections that share a weight's order or its input "
                f"scale; it lacks {first_few(missing)}"
            )

    def _check_head(self) -> None:
        """Raises ModelError if a tied model's head would differ from the embeddings."""
        head = self._found.get(self.family.head)
        if head is None or self.family.head in self._places or not isinstance(self.model, Decoder):
            return
        source = self.family.source(self.model.spec, "embedding.weight")
        embedding = self._found.get(source.name)
        if embedding is None:
            check_tied(head, self.model, self.family.head)
        elif not torch.equal(*(each.file.get_tensor(each.name) for each in (head, embedding))):
            raise ModelError(
                f"config.json says that the head is tied to the embeddings, but {head.name} "
                f"differs from {embedding.name}"
            )

    @property
    def stored_names(self) -> set[str]:
        """The tensors' names in the files."""
        return {entry.name for entry in self._found.values()}

    def write(self, tensors: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Writes the values in place, on this rank. After an error the weights are undefined.

        Args:
            tensors: the tensors with their names in the files, each once, for files whose tensors
                have no content. None: the files' own tensors.

        Raises:
            ModelError: a tensor's content is invalid, or a tensor does not come.
        """
        with torch.inference_mode(), _original_order(self._modules.values()):
            # The slices of layers in another order have changed.
            places = places_of(self.model, self.family)
            for name, entry in self._found.items():
                if name in places:
                    shape = tuple(entry.file.get_slice(entry.name).get_shape())
                    places[name] = in_layout(places[name], shape)
            if tensors is not None:
                self._write_in_order(tensors, places)
            else:
                with ThreadPoolExecutor(READERS) as pool:
                    jobs = [
                        pool.submit(fill, entry, places.get(name, ()))
                        for name, entry in self._found.items()
                    ]
                    for job in jobs:
                        job.result()
            for module in self._modules.values():
                if callable(finish := getattr(module, "finish", None)):
                    finish()
        if any("scales" in name for name, _ in self.model.named_parameters()):
            check_weights(self.model, self.family, self._modules.keys())

    def _write_in_order(self, tensors: Iterable[tuple[str, Tensor]], places: Any) -> None:
        missing = {entry.name: name for name, entry in self._found.items()}
        for stored, tensor in tensors:
            name = missing.pop(stored, None)
            if name is not None:
                entry = StoredTensor(TensorFile({stored: tensor}), stored, tensor.nbytes)
                fill(entry, places.get(name, ()))
        if missing:
            raise ModelError(f"tensors did not come: {first_few(sorted(missing))}")


def has_tensors_of(model: DecoderLayers, family: Family, files: Sequence[Any]) -> bool:
    """Returns whether files have any tensor of a model."""
    places = places_of(model, family)
    return any(family.canonical(name) in places for file in files for name in file.keys())  # noqa: SIM118


def reload_weights(model: DecoderLayers, path: str | Path, load_format: str, seed: int) -> None:
    """Reads all weights of a loaded model from its files again. See `load_weights`."""
    with torch.inference_mode(), _original_order(model.modules()):
        load_weights(model, path, load_format, seed)


@contextlib.contextmanager
def _original_order(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives layers whose weights are reordered for a CPU the checkpoint's order for a block of
    code, in which all of their weights are written."""
    layers = [module for module in modules if isinstance(module, Linear)]
    reordered = [layer for layer in layers if any(w.prepacked is not None for w in layer.weights)]
    for layer in reordered:
        unpack_layer(layer)
    yield
    for layer in reordered:
        prepack_layer(layer)


def _is_announced(entry: StoredTensor) -> bool:
    """Whether only the shape and the dtype of a tensor are known yet."""
    return isinstance(entry.file, TensorFile) and entry.file.get_tensor(entry.name).is_meta


def _refuse_scales(files: Sequence[Any], family: Family) -> None:
    scales = [name for file in files for name in file.keys() if is_scale(family.canonical(name))]  # noqa: SIM118
    if scales:
        raise ModelError(
            f"scales of 8-bit KV cannot change while the engine runs: {first_few(scales)}; leave "
            "them out of the update"
        )
