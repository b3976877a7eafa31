"""Where compiled kernels are kept between processes, and what makes them stale."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from functools import cache
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
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:  # of installed metadata: reading them by importlib takes a millisecond a package
            stem, kind = os.path.splitext(name)
            if kind in (".dist-info", ".egg-info"):
                package, _, version = stem.partition("-")
                found.setdefault(package.lower().replace("_", "-"), version)
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python, **{name: found.get(name, "") for name in packages}}
