"""Models in GGUF files, the format of llama.cpp."""

from quire.models.gguf.file import GgufFile, stored_family
from quire.models.gguf.folder import folder_of, open_model

__all__ = ["GgufFile", "folder_of", "open_model", "stored_family"]
