"""Reading the .npz files that users give to the commands."""

from __future__ import annotations

import os
import zipfile

import numpy as np

from nbattn.errors import ContractError


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, or raise a ContractError that says why it cannot be read."""
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no zip archive")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ContractError(f"file: must be an .npz file as numpy.savez writes it, got {path}: {reason}.") from error
