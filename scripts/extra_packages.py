"""Packages that a plain installation does not bring: a script that lacks one says how to install it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def needed(package: str, install: str) -> Any:
    """Return a package, or end the script and say what to give to pip."""
    try:
        return import_module(package)
    except ImportError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: needs {package}, got {error}. In a clone: pip install {install}")
