"""Loads the compiled kernels, `_C.so` beside this file, and remembers why if they cannot be loaded."""

from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_C.so")
LOAD_ERROR: str | None = "not loaded yet"


def load() -> None:
    """Registers the compiled operators. Never raises: `LOAD_ERROR` is None on success, else the reason."""
    global LOAD_ERROR
    if not LIBRARY.exists():
        LOAD_ERROR = f"{LIBRARY.name} was not built for this installation"
        return
    try:
        torch.ops.load_library(str(LIBRARY))
        LOAD_ERROR = None
    except Exception as error:
        LOAD_ERROR = f"{LIBRARY.name} cannot be loaded: {error}"
