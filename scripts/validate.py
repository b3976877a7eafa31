"""Validate every operator against the float64 oracle; the same as ``python -m nbattn validate``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout without an installation will do

from nbattn.validate import main

if __name__ == "__main__":
    sys.exit(main())
