"""The three errors of the library; every message reads *argument: rule, got value. Hint.*"""


class ContractError(ValueError):
    """An argument breaks a rule of the operator; nothing was computed or written."""


class PageTableError(ContractError):
    """A page table, a length or an offset array is inconsistent; the message names the request."""


class TargetError(RuntimeError):
    """The requested target cannot run here (no GPU, no driver, a missing package) or cannot run this dtype."""
