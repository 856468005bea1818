"""The outcome of the fault matrix as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.cases import FAULTS, PHASES, SPLITS
from tests.faults.run import Limits, Outcome

_HEADER = """# Fault matrix

`make faults` injects one fault into one rank of a job of two ranks and checks how the job ends. With a step timeout of
{step:g} s and a join timeout of {join:g} s, every process must have ended {end:g} s after the fault.

- {count} cases: {wrong} wrong. {hung} hung, {late} ended late, {blame} named a wrong culprit or reason, {left} left
  something behind. Slowest: {slowest:.1f} s.
- A cell has the number of cases that ended as required (of those that ran), and the longest time from fault to end.
- Jobs: `yalis generate` on a tiny random model; rank 0 starts rank 1 (`tp2`, `pp2`, `dp2`), both are started with
  torchrun's variables on one host (`launched`), or one on each of two network namespaces (`hosts`).
- A stopped rank that no other rank can kill (rank 0, or a rank that a launcher started) gets SIGCONT after the others
  have ended, and must then end by itself; a rank that hangs before it has joined gets SIGTERM.
"""


def markdown(outcomes: Sequence[Outcome], limits: Limits) -> str:
    problems = [" ".join(outcome.problems) for outcome in outcomes]
    text = _HEADER.format(
        step=limits.step_timeout,
        join=limits.join_timeout,
        end=limits.end,
        count=len(outcomes),
        wrong=sum(bool(problem) for problem in problems),
        hung=sum(outcome.hung for outcome in outcomes),
        late=sum("ended after" in problem for problem in problems),
        blame=sum(any(word in problem for word in ("blamed", "name", "reason", "say")) for problem in problems),
        left=sum(bool(outcome.left) and not outcome.hung for outcome in outcomes),
        slowest=max((outcome.seconds or 0 for outcome in outcomes), default=0),
    )
    splits = [split for split in SPLITS if any(outcome.case.split == split for outcome in outcomes)]
    lines = ["", f"| fault | phase | {' | '.join(splits)} |", f"| --- | --- |{' --- |' * len(splits)}"]
    for fault in FAULTS:
        for phase in PHASES:
            row = [one for one in outcomes if (one.case.fault, one.case.phase) == (fault, phase)]
            if row:
                cells = (_cell([one for one in row if one.case.split == split]) for split in splits)
                lines.append(f"| {fault} | {phase} | {' | '.join(cells)} |")
    if any(problems):
        lines += ["", "## Cases with a problem", "", "| case | problem | last error |", "| --- | --- | --- |"]
        wrong = sorted((one for one in outcomes if one.problems), key=lambda one: str(one.case))
        lines += [f"| {one.case} | {'; '.join(one.problems)} | {one.sentence} |" for one in wrong]
    return text + "\n".join(lines) + "\n"


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "–"
    right = sum(not outcome.problems for outcome in outcomes)
    times = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    return f"{right}/{len(outcomes)}, {max(times):.1f} s" if times else f"{right}/{len(outcomes)}"
