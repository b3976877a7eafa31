"""Matrix products of a warp and of a warpgroup in the emulator: fragments gathered, multiplied in float32, spread."""

from __future__ import annotations

import re
from collections.abc import Callable

import machine
import numpy as np
from machine import WARP, shared, together, wrap

LANES = np.arange(WARP)
GROUP, QUAD = LANES // 4, LANES % 4  # r and c of a lane


NUMBERS = {
    "bf16": lambda bits: (bits << 16).astype(np.uint32).view(np.float32),
    "f16": lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float32),
}


def multiply(number_of: Callable) -> Callable:
    """Return ``mma.m16n8k16``: every lane's fragments gathered, multiplied in float32, and spread again."""

    def combine(lanes):
        words = np.array([[wrap(x, 32, False) for x in lane[:6]] for lane in lanes], np.uint32)
        given = np.array([lane[6:] for lane in lanes], np.float32)
        low, high = number_of(words & 0xFFFF), number_of(words >> 16)
        a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
        for i in range(4):
            row, column = GROUP + 8 * (i % 2), 2 * QUAD + 8 * (i // 2)
            a[row, column], a[row, column + 1] = low[:, i], high[:, i]
            c[GROUP + 8 * (i // 2), 2 * QUAD + i % 2] = given[:, i]
        for i in range(2):
            b[2 * QUAD + 8 * i, GROUP], b[2 * QUAD + 8 * i + 1, GROUP] = low[:, 4 + i], high[:, 4 + i]
        d = c + a @ b
        spread = np.stack([d[GROUP + 8 * (i // 2), 2 * QUAD + i % 2] for i in range(4)], 1)
        return [tuple(row) for row in spread]

    return lambda *fragments: together("warp", "multiply", fragments, combine)


def load_matrices(transposed: bool) -> Callable:
    def combine(addresses):
        rows = [shared(wrap(address, 32, True), 16).view(np.uint16) for address in addresses]
        matrices = np.stack(rows).reshape(4, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        low = matrices[:, GROUP, 2 * QUAD].astype(np.int64)
        high = matrices[:, GROUP, 2 * QUAD + 1].astype(np.int64)
        words = low | high << 16
        return [tuple(int(x) for x in words[:, lane]) for lane in range(WARP)]

    return lambda address: together("warp", "load_matrices", address, combine)


def _matrix(descriptor: int, rows: int, along_rows: bool) -> np.ndarray:
    """Return the bits ``[rows, 16]`` of a matrix in shared memory, a side of a product of a warpgroup.

    By the PTX manual's canonical layouts of the 128-byte swizzle: eight rows of 128 bytes, whose chunks of 16 bytes are
    exchanged by three bits of the address, repeat at the second stride; if it is read `along_rows` of memory, 64
    columns of such rows repeat at the first stride.
    """
    start, first, second = (16 * (descriptor >> bit & 0x3FFF) for bit in (0, 16, 32))
    assert wrap(descriptor, 64, False) >> 49 == 1 << 13, "128-byte swizzle, rows that start at multiples of 1024"
    row, column = np.arange(rows)[:, None], np.arange(16)[None, :]
    if along_rows:
        address = start + row // 64 * first + row % 64 * 2 + column // 8 * second + column % 8 * 128
    else:
        address = start + row // 8 * second + row % 8 * 128 + column * 2
    address = address ^ (address >> 7 & 7) << 4
    block = machine.current.block
    assert (block.unpublished[address] < 0).all(), "matrix units read what no fence has published"
    return block.shared.view(np.uint16)[address // 2]


def warpgroup_product(text: str, keeps: bool) -> Callable:
    """Return the stand-in of a product of `nbattn.cuda_kernels.warpgroup`, which executes its text at once."""
    add = r"add\.s64 (\w+), \$(\d+), (\d+);"
    multiply = r"m64n(\d+)k16\.f32\.(\w+)\.\w+ \{[^}]*\}, (\{[^}]*\}|a), b, ([ft]), 1, 1, ([01, ]+);"
    lines = re.findall(f"{add}|{multiply}", text)

    def combine(lanes):
        numbers = len(lanes[0][0])
        tile, e = np.divmod(np.arange(numbers), 4)
        thread = np.arange(128)[:, None]
        row, column = thread // 32 * 16 + thread % 32 // 4 + e // 2 * 8, tile * 8 + thread % 4 * 2 + e % 2
        d = np.zeros((64, 2 * numbers), np.float32)
        if keeps:
            d[row, column] = [lane[0] for lane in lanes]
        before = numbers * (1 + keeps) - 1  # operands ahead of the first input, which is a lane's second value
        registers: dict[str, int] = {}
        for target, operand, offset, columns, kind, left, adds, transposed in lines:
            if target:
                registers[target] = lanes[0][int(operand) - before] + int(offset)
                continue
            assert int(columns) == 2 * numbers
            if left == "a":
                a = _matrix(registers["a"], 64, False)
            else:
                a = np.zeros((64, 16), np.uint32)
                for i, place in enumerate(re.findall(r"\d+", left)):
                    words = np.array([wrap(lane[int(place) - before], 32, False) for lane in lanes], np.uint32)
                    r, k = row[:, 0] + i % 2 * 8, thread[:, 0] % 4 * 2 + i // 2 * 8
                    a[r, k], a[r, k + 1] = words & 0xFFFF, words >> 16
            b = _matrix(registers["b"], 2 * numbers, transposed[-1] == "1")
            product = NUMBERS[kind](a.astype(np.uint32)) @ NUMBERS[kind](b.astype(np.uint32)).T
            d = d + product if adds == "t" else product
        return list(d[row, column])

    def product(target, *operands):
        flat = [x for operand in operands for x in (operand if isinstance(operand, list) else [operand])]
        target[:] = together("warpgroup", text[:120], (list(target), *flat), combine)

    return product
