"""Downloads of models from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.errors import ModelError

_SETTINGS = ["*.json", "*.jinja", "tiktoken.model", "tokenizer.model"]
_WANTED = ["*.safetensors", *_SETTINGS]
_UNWANTED = ["original/*", "consolidated*"]


def download(model: str, revision: str | None, *, weights: bool = True) -> Path:
    """Returns the folder of a model of the hub, fetched if it is not there yet. Without `weights`
    only the small files that describe the model are fetched.

    Raises:
        ModelError: it cannot be had.
    """
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=_WANTED if weights else _SETTINGS,
            ignore_patterns=_UNWANTED,
        )
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model} is neither a local folder nor a model on the hub that you have access to"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model} on the hub has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"{model} is not a local folder, and it could not be fetched from the hub "
            f"({type(error).__name__}). Without a network, give a folder or download it before."
        ) from error
    return Path(folder)
