"""What every specialisation takes of a multiprocessor; `python register_table.py` writes registers.txt anew."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbattn.cache import versions_of
from nbattn.cuda_kernels import compile as compiler
from nbattn.cuda_kernels.shapes import specialisations

CC = (9, 0)  # H200
TABLE = Path(__file__).with_name("registers.txt")
FORBIDDEN = {  # slow on a GPU, or a sign that registers have become memory
    "float64 arithmetic": r"\.f64",
    "64-bit division": r"\b(?:div|rem)\.[su]64",
    "local memory": r"\.local",
    "call": r"^\s*call",
    "external function": r"\.extern \.func",
}
CONVERSIONS = r"\.reg \.f64|ld\.global(?:\.nc)?\.f64|st\.global\.f64|cvt\.rn\.f32\.f64|cvt\.f64\.f32"  # of an lse


def to_compile() -> list[tuple[str, dict[str, Any]]]:
    """Return what is compiled here: an H200's kernels, and what bfloat16 takes elsewhere instead of its sisters'.

    float16 differs from bfloat16 in the names of instructions only: it stands for the blocks of one warpgroup.
    """
    found = [
        (family, constants)
        for family, constants in specialisations(CC)
        if family != "paged_wgmma" or (constants["cache"] == "bfloat16") == (constants["groups"] == 2)
    ]
    elsewhere = [s for s in specialisations((8, 0)) if s[0] == "paged_prefill" and s[1]["cache"] == "bfloat16"]
    return found + [s for s in elsewhere if s[1] != {"cache": "bfloat16", "head_dim": 64, "full": False}]


@dataclass(frozen=True)
class Compiled:
    """One specialisation: its PTX, and what the assembler says of it."""

    label: str
    ptx: str
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    blocks: int
    threads: int
    remarks: list[str]
    names: tuple[str, str]  # of the kernel: as the launcher finds it, and as the assembler reports it

    @property
    def line(self) -> str:
        """The table's line."""
        return f"{self.label:64s} {self.registers:4d} {self.shared_bytes:7d} {self.blocks:2d}"


def label_of(family: str, constants: dict[str, Any]) -> str:
    """Return a specialisation's name in the table."""
    return f"{family}({','.join(f'{k}={v}' for k, v in constants.items())})"


def compiled(family: str, constants: dict[str, Any]) -> Compiled:
    """Compile a specialisation for an H200."""
    kernel, code = compiler.to_code(family, constants, CC)
    image, report = compiler.to_cubin(code, CC)
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    )
    remarks = re.findall(r"\(C\d+\).*", report)  # e.g. that matrix instructions wait for each other
    return Compiled(
        label_of(family, constants), compiler.to_ptx(code, CC), registers, stores + loads, stack, kernel.shared_bytes,
        kernel.blocks_per_multiprocessor, kernel.threads, remarks,
        (compiler.entry_name(image, family), re.search(r"Compiling entry function '([^']+)'", report).group(1)),
    )  # fmt: skip


def faults(ptx: str, *, converts_lse: bool) -> list[str]:
    """Return what the lint finds."""
    text = re.sub(CONVERSIONS, "", ptx) if converts_lse else ptx
    return [name for name, pattern in FORBIDDEN.items() if re.search(pattern, text, re.M)]


def read_table() -> dict[str, int]:
    """Return the registers of each specialisation in the table."""
    lines = [line.split() for line in TABLE.read_text().splitlines() if "(" in line and not line.startswith("#")]
    return {label: int(registers) for label, registers, *_ in lines}


if __name__ == "__main__":
    version = versions_of("nvidia-nvvm")["nvidia-nvvm"]
    head = f"# {'specialisation':62s} regs  shared blocks, sm_90a, {version}\n"
    rows = [compiled(family, constants) for family, constants in to_compile()]
    TABLE.write_text(head + "\n".join(row.line for row in rows) + "\n")
    print("spills:", [row.label for row in rows if row.spilled_bytes or row.stack_bytes] or "none")
