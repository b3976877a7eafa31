"""The command line: ``python -m nbattn info | validate | explain``."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "info": "a paste-ready diagnosis of this machine and installation",
    "validate": "every operator against its float64 definition",
    "explain": "the page table in an .npz file as a picture",
}
USAGE = "usage: python -m nbattn COMMAND [OPTIONS]\n\n" + "\n".join(
    f"  {name:<10}{text}" for name, text in COMMANDS.items()
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command named by the first argument and return its exit status; each lives in the module of its name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else None
    if command in COMMANDS:
        try:
            module = import_module(f"nbattn.{command}")
        except ModuleNotFoundError as error:
            print(f"nbattn {command}: {error}. python -m nbattn info lists what is missing.", file=sys.stderr)
            return 2
        return module.main(arguments[1:])
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    print(USAGE if command is None else f"nbattn: no command {command!r}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
