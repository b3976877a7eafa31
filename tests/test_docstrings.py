"""Public names carry complete numpydoc docstrings whose examples run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import nbattn
from nbattn.arrays import Array

EXCEPTIONS = {"ContractError", "PageTableError", "TargetError", "__version__"}
MODULES = {"cascade", "oracle", "testing"}
NAMES = sorted(set(nbattn.__all__) - EXCEPTIONS - MODULES)


def package_modules():
    """Return the names of the package's modules that need no GPU package."""
    root = Path(nbattn.__file__).parent
    kernels = Path(importlib.import_module("nbattn.cpu_ref").__file__).parent
    names = [("nbattn", root, path) for path in root.rglob("*.py")]
    names += [("nbattn.cpu_ref", kernels, path) for path in kernels.glob("*.py")]
    found = [".".join([top, *path.relative_to(base).with_suffix("").parts]) for top, base, path in names]
    return sorted(name.removesuffix(".__init__") for name in found if "__main__" not in name and "cuda" not in name)


def public_functions():
    """Yield (name, function) for functions and for the public methods of classes."""
    for name in NAMES:
        x = getattr(nbattn, name)
        yield name, x
        if inspect.isclass(x):
            for attribute, method in vars(x).items():
                function = method.__func__ if isinstance(method, classmethod) else method
                if inspect.isfunction(function) and not attribute.startswith("_"):
                    yield f"{name}.{attribute}", function


PUBLIC = dict(public_functions())


@pytest.mark.parametrize("name", package_modules())
def test_examples_run(name, monkeypatch):
    module = importlib.import_module(name)
    with np.printoptions():
        results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    nbattn.set_num_threads(None)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(nbattn, name)), f"{name} has no example"


def test_the_package_and_its_modules_have_examples():
    for module in (nbattn, nbattn.oracle, nbattn.testing):
        assert ">>> " in module.__doc__


SHORT = (
    "explain",
    "check",
    "check_call",
    "reset_workspace_buffer",
    "forward_return_lse",
    "end_forward",
    "covers",
)  # one line says it


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_numpydoc(name):
    text = inspect.getdoc(PUBLIC[name])
    assert text, f"{name} has no docstring"
    assert text[0].isupper() or text[0] == "`", f"{name}: {text.splitlines()[0]}"
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    given = [p.name for p in parameters if p.kind not in kinds and p.name not in ("self", "cls")]
    if not given or name.split(".")[-1] in SHORT:
        return
    if "Attributes\n----------" in text:  # made by functions that document their parameters
        return
    assert "Parameters\n----------" in text, f"{name} has no section of parameters"
    section = text.split("Parameters\n----------\n")[1].split("\n\n")[0]
    if re.search(r"options are those\s+of", text, re.IGNORECASE):  # and names the function whose they are
        return
    listed = {
        word.strip() for line in section.splitlines() if line[:1].strip() for word in line.split(" : ")[0].split(",")
    }
    assert set(given) <= listed, f"{name} does not list {sorted(set(given) - listed)}"


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(nbattn, name))])
def test_functions_say_what_they_return_and_refuse(name):
    text = inspect.getdoc(getattr(nbattn, name))
    annotation = inspect.signature(getattr(nbattn, name)).return_annotation
    if annotation not in ("None", None) and name != "get_num_threads":
        assert "Returns\n-------" in text, f"{name} does not say what it returns"
    takes_arrays = any(
        p.annotation in ("Array", Array) for p in inspect.signature(getattr(nbattn, name)).parameters.values()
    )
    if takes_arrays and "As `paged_attention`" not in text and "As for `paged_attention`" not in text:
        assert "Raises\n------" in text, f"{name} does not say what it refuses"
