"""Where compiled kernels are kept between processes, and what makes them stale."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("nbattn")

_SETTLED = 2_000_000_000  # nanoseconds; changes that follow one another faster may leave a file with the same times


def cache_directory() -> Path:
    """Return the folder of compiled kernels: ``NBATTN_CACHE_DIR``, else ``nbattn`` in the user's cache folder."""
    chosen = os.environ.get("NBATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nbattn"


def fingerprint(sources: Sequence[str], packages: Sequence[str]) -> str:
    """Return the hash of the contents of source files and of the versions of Python and of packages.

    Reading them all takes longer than loading a kernel. The hash is kept in the cache folder, together with the state
    of every source file and of every folder that may name an installed package: its inode, its size and when it was
    changed. Contents and names are read again if any of that differs, or was so recent that it would not differ.
    """
    folders = [folder or "." for folder in sys.path]
    state, newest = _state_of([*sources, *folders])
    kept = cache_directory() / f"{_hash(sys.version_info[:2], sources, packages, folders)}.sources"
    with contextlib.suppress(OSError, ValueError), open(kept, "rb") as file:  # there is none, or a damaged one
        known_state, found = file.read().decode().split()
        if known_state == state:
            return found
    found = _hash(hash_of(sources), versions_of(*packages))
    if newest < time.time_ns() - _SETTLED:
        try:
            write_whole(kept, f"{state} {found}".encode())
        except OSError as error:
            logger.debug("the hash of the sources cannot be kept as %s (%s)", kept, error)
    return found


def _state_of(paths: Iterable[str]) -> tuple[str, int]:
    """Return what changes whenever one of some files or folders does, and when the last one was changed."""
    found: list[Any] = []
    newest = 0
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:  # sys.path may name what does not exist
            found.append(path)
            continue
        found += state.st_ctime_ns, state.st_mtime_ns, state.st_size, state.st_ino, state.st_dev
        newest = max(newest, state.st_ctime_ns, state.st_mtime_ns)
    return _hash(found), newest


def _hash(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through a temporary name, so that another process sees the whole of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def hash_of(sources: Iterable[str | Path]) -> str:
    """Return the hash of some source files: their names and contents."""
    digest = hashlib.sha256()
    for path in sources:
        with open(path, "rb") as file:
            digest.update(os.path.basename(path).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()


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
