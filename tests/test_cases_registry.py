"""Every row of the list of small inputs that broke other systems is a test of this library."""

import re
from pathlib import Path

ROWS = {"S": 8, "M": 12, "W": 6, "R": 14, "N": 6, "P": 15}


def test_every_row_has_a_test():
    listed = {f"{letter}{number}" for letter, count in ROWS.items() for number in range(1, count + 1)}
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    names = [name for file in files for name in re.findall(r"^def test_([a-z]\d+)_", file.read_text(), re.MULTILINE)]
    assert listed - {name.upper() for name in names} == set()
