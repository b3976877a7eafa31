"""The examples run and print what they promise."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PRINTED = {
    "shared_prefix.py": r"differ by (0\.0e\+00|\d\.\de-0[78]), lse by (0\.0e\+00|\d\.\de-0[78])\n$",
    "check_your_kernel.py": r"^out: 0 of 9472 .*\nout: [1-9]\d* of 9472 .*\n$",
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_prints_what_it_promises(name, capsys):
    runpy.run_path(str(EXAMPLES / name))
    assert re.search(PRINTED[name], capsys.readouterr().out)
