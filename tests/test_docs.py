"""The pages' Python blocks run, and what they print is what their comments say.

A block marked ``python`` is run, in the namespace of the blocks before it on its page; other systems' code is marked
``text``. A comment behind ``print(...)`` is what it prints. A block that imports CuPy is only compiled where no GPU is.
"""

import ast
import contextlib
import io
import re
import tokenize
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "text", "sh"}


def blocks(text, language="python"):
    """Return ``(first line, code)`` of a page's blocks in one language."""
    return [(text[: m.start(2)].count("\n") + 1, m[2]) for m in FENCE.finditer(text) if m[1] == language]


def runs_here(code):
    if "import cupy" not in code:
        return True
    return util.find_spec("cupy") is not None and __import__("cupy").is_available()


def promises(code):
    """Return the comments at the ends of lines, by line number."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def is_print(statement):
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"


def run(code, namespace, name, first_line):
    """Run a block statement by statement, and return ``(line, printed, promised)`` of its prints with a comment."""
    compared, comments = [], promises(code)
    for statement in ast.parse(code).body:
        printed = io.StringIO()
        line = statement.end_lineno
        program = ast.increment_lineno(ast.Module([statement], []), first_line - 1)
        with contextlib.redirect_stdout(printed):
            exec(compile(program, name, "exec"), namespace)
        if is_print(statement) and line in comments:
            compared.append((first_line + line - 1, printed.getvalue().rstrip("\n"), comments[line]))
    return compared


def check(text, name="page"):
    """Run a page's blocks and return how many were run; an assertion names the line of the first wrong comment."""
    namespace, count = {"__name__": name}, 0
    for first_line, code in blocks(text):
        if not runs_here(code):
            compile(code, name, "exec")
            continue
        for line, printed, promised in run(code, namespace, name, first_line):
            assert printed == promised, f"{name}:{line} printed {printed!r}"
        count += 1
    return count


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page.read_text())])
def test_python_blocks_run(name):
    assert check(PAGES[name].read_text(), name) >= 1, f"{name}: no block was run"


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_marked(name):
    text = PAGES[name].read_text()
    found = [m[1] for m in FENCE.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), f"{name}: a block that is not understood"
    if name != "semantics.md":  # whose formulas are marked as nothing
        assert set(found) <= LANGUAGES


def test_pages_with_examples_are_run():
    for name in ("README.md", "coming_from.md"):
        assert blocks(PAGES[name].read_text()), f"{name} has no Python block"


def anchors(page):
    """Return what a link may name behind ``#``: a page's headings, as the places that show them spell anchors."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", page.read_text()):
        if not target.startswith(("https://", "http://")):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(linked), f"{name}: {target}#{anchor}"


@pytest.mark.parametrize(
    "page",
    [
        "```python\nx = 1\nprint(x)  # 2\n```\n",
        "```python\nx = 1\n```\n\n```python\nprint(\n    x + 1,\n    x,\n)  # 2 2\n```\n",
        "```python\nassert False\n```\n",
    ],
)
def test_a_wrong_page_is_found(page):
    with pytest.raises(AssertionError):
        check(page)
