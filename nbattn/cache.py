"""Where compiled kernels are kept between processes, and what makes them stale."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path


def cache_directory() -> Path:
    """Return the folder of compiled kernels: ``NBATTN_CACHE_DIR``, else ``nbattn`` in the user's cache folder."""
    chosen = os.environ.get("NBATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nbattn"


def hash_of(sources: Iterable[Path]) -> str:
    """Return the hash of some source files: their names and contents."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the named packages; absent ones are empty."""
    versions = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions
