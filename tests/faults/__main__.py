"""`python -m tests.faults`: run the fault matrix, print its table, exit with status 1 if a case has a problem."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.cases import cover, matrix
from tests.faults.run import Limits, Outcome, Runner
from tests.faults.table import markdown
from tests.launchers.launch import make_model
from yalis import machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--jobs", type=int, default=6, help="jobs at a time (default: 6)")
    parser.add_argument("--cases", default="*", help="patterns such as 'kill-*-tp2-*', separated by spaces")
    parser.add_argument("--cover", action="store_true", help="only the pairwise cover that `make test` runs")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--verbose", action="store_true", help="print the whole error output of cases with a problem")
    parser.add_argument("--out", type=Path, help="write matrix.json and matrix.md into this folder")
    args = parser.parse_args()
    every = cover() if args.cover else matrix()
    cases = [case for case in every if any(fnmatch.fnmatch(str(case), one) for one in args.cases.split())]
    if args.list:
        print("\n".join(map(str, cases)))
        return 0
    if not cases:
        parser.error(f"no case matches {args.cases!r}; --list shows their names")
    print(f"{len(cases)} cases, {args.jobs} at a time", flush=True)
    begin, done = time.monotonic(), 0

    def report(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        seconds = "    –" if outcome.seconds is None else f"{outcome.seconds:5.1f}"
        verdict = "; ".join(outcome.problems) or "ok"
        print(f"[{time.monotonic() - begin:5.0f} s] {done:3}/{len(cases)} {seconds} s  {outcome.case}: {verdict}")
        if outcome.problems:
            print(f"    {outcome.errors.strip() if args.verbose else outcome.sentence}".replace("\n", "\n    "))
        sys.stdout.flush()

    limits = Limits()
    with TemporaryDirectory(prefix="yalis-faults-") as folder:
        model = make_model(Path(folder))
        outcomes = Runner(Path(folder), model, limits, report).run(cases, args.jobs)
    order = {case: number for number, case in enumerate(every)}
    outcomes.sort(key=lambda outcome: order[outcome.case])
    seconds, host, versions = round(time.monotonic() - begin), machine.host(), machine.versions()
    text = markdown(outcomes, limits)
    print(f"\n{text}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        head = {"versions": versions, "host": host, "revision": machine.revision()}
        settings = {"jobs": args.jobs, "limits": vars(limits), "seconds": seconds}
        rows = ",\n".join(f"  {json.dumps(outcome.to_json())}" for outcome in outcomes)
        top = json.dumps({**head, **settings}, indent=1).removesuffix("\n}")
        (args.out / "matrix.json").write_text(f'{top},\n "cases": [\n{rows}\n ]\n}}\n')
        where = f"{host['cores']} cores of {host['cpu']}, torch {versions['torch']}, {args.jobs} jobs at a time"
        (args.out / "matrix.md").write_text(f"{text}\nMeasured on {where}, in {seconds / 60:.0f} minutes.\n")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
