"""How many threads a call on the CPU may use."""

from __future__ import annotations

import os

from nbattn import forks as forks  # its hooks belong to the threads' side of the CPU target
from nbattn.errors import ContractError

_chosen: int | None = None


def get_num_threads() -> int:
    """Return how many threads a call on the CPU may use, the calling one included.

    By default the environment variable ``NUMBA_NUM_THREADS``, else all cores this process may run on.

    Examples
    --------
    >>> import nbattn
    >>> nbattn.get_num_threads() >= 1
    True
    """
    if _chosen is not None:
        return _chosen
    given = os.environ.get("NUMBA_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_num_threads(n: int | None) -> None:
    """Set how many threads a call on the CPU may use; None restores the default.

    Parameters
    ----------
    n : int or None
        At least 1.

    Raises
    ------
    ContractError
        If `n` is neither None nor a positive int.

    Examples
    --------
    >>> import nbattn
    >>> nbattn.set_num_threads(1)
    >>> nbattn.get_num_threads()
    1
    >>> nbattn.set_num_threads(None)
    """
    global _chosen
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise ContractError(f"n: must be a positive int or None, got {n!r}.")
    _chosen = n
