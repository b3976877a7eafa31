"""Draw many random cases over layouts, dtypes and options together, and hold each to the oracle within its budget.

Case `i` of a seed is always the same, whichever part of a campaign runs it; a failure prints its repr, the repro::

    python scripts/random_campaign.py --cases 3000 --seed 1
    python scripts/random_campaign.py --cases 3000 --seed 1 --part 0/2     # one of two processes
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from nbattn import testing

EVERY = (*testing.FAMILIES, *testing.FACES, *testing.WRAPPERS)


@dataclass
class Tally:
    """What the cases of one family and pair of dtypes came to."""

    cases: int = 0
    failures: int = 0
    worst: float = 0.0  # largest error as a fraction of its budget


def case_number(number: int, seed: int, families: tuple[str, ...]) -> testing.Case:
    """Return case `number` of a seed."""
    return testing.random_case(families[number % len(families)], np.random.default_rng([seed, number]))


def run_one(case: testing.Case) -> tuple[float, str]:
    """Return the largest error as a fraction of its budget, and what is wrong ("" if nothing is)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = testing.run_case(case)
    except Exception as error:  # a crash of a case is a finding like any other, and the campaign goes on
        return np.inf, f"{case!r}\n{type(error).__name__}: {error}"
    return result.budget_share, "" if result.passed else str(result)


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign, print failures as they come and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", default=",".join(EVERY), help="comma-separated (default: all)")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="run every Nth case from case I on")
    options = parser.parse_args(arguments)
    families = tuple(options.families.split(","))
    part, parts = map(int, options.part.split("/"))
    table: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
    begin = time.perf_counter()
    for number in range(part, options.cases, parts):
        case = case_number(number, options.seed, families)
        share, wrong = run_one(case)
        tally = table[(case.family, case.q_dtype, getattr(case, "kv_dtype", None) or case.q_dtype)]
        tally.cases += 1
        tally.failures += bool(wrong)
        tally.worst = max(tally.worst, share)
        if wrong:
            print(f"case {number}: {wrong}", flush=True)
    print(f"{'family':<32}{'q':<10}{'k, v':<15}{'cases':>6}{'failed':>8}{'error/budget':>14}")
    for (family, q_dtype, kv_dtype), tally in sorted(table.items()):
        row = f"{family:<32}{q_dtype:<10}{kv_dtype:<15}{tally.cases:>6}{tally.failures:>8}{tally.worst:>14.3f}"
        print(row)
    cases, failures = sum(t.cases for t in table.values()), sum(t.failures for t in table.values())
    print(f"seed {options.seed}: {cases} cases, {failures} failed, {time.perf_counter() - begin:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
