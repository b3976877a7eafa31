"""docs/semantics.md names a function for every rule, and every name is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "semantics.md").read_text()
RULES = [line for line in TEXT.split("## Where systems disagree")[0].splitlines() if re.match(r"\| (?!rule|-)", line)]
NAMES = sorted(set(re.findall(r"`(nbattn(?:\.\w+)+)`", TEXT)))


def resolve(name):
    """Return what a dotted name stands for: the longest importable module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"{name}: no such module")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name):
    found = resolve(name)
    if name != "nbattn.oracle":
        assert callable(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda line: line.split("|")[1].strip()[:50])
def test_every_rule_has_a_function(rule):
    assert re.search(r"`nbattn\.[\w.]+`", rule.split("|")[-2])


def test_the_tables_were_found():
    assert len(RULES) > 40
    assert len(NAMES) > 40
