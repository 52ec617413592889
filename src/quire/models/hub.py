"""Downloads of models and adapters from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.errors import ModelError

_SETTINGS = ["*.json", "*.jinja", "tiktoken.model", "tokenizer.model"]
_WANTED = ["*.safetensors", *_SETTINGS]
_UNWANTED = ["original/*", "consolidated*"]
_OF_ADAPTERS = ["adapter_config.json", "adapter_model.safetensors"]


def download(model: str, revision: str | None, *, weights: bool = True) -> Path:
    """Returns the folder of a model of the hub, fetched if it is not there yet. Without `weights`
    only the small files that describe the model are fetched.

    Raises:
        ModelError: it cannot be had.
    """
    return _download(model, revision, _WANTED if weights else _SETTINGS)


def download_adapter(adapter: str) -> Path:
    """Returns the folder of a LoRA adapter of the hub, fetched if it is not there yet.

    Raises:
        ModelError: it cannot be had.
    """
    return _download(adapter, None, _OF_ADAPTERS)


def _download(name: str, revision: str | None, wanted: list[str]) -> Path:
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED
        )
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is neither a local folder nor on the hub, as far as you have access"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} on the hub has no revision {revision!r}") from error
    except Exception as error:  # of its HTTP client, which is another in each version
        raise ModelError(
            f"{name} is not a local folder, and it could not be fetched from the hub "
            f"({type(error).__name__}). Without a network, give a folder or download it before."
        ) from error
    return Path(folder)
