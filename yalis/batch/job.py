"""An offline job: every line of a JSONL file answered once, whatever interrupts it.

The input is read twice from the same open file: first its ids, so that a duplicate is refused before any work, then its
requests, of which only a window is held at a time. Results are written in the order in which they finish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from yalis.batch.input import BadLine, GoodLine, Wanted, parse, read_raw, survey
from yalis.batch.output import ResultFile, answer
from yalis.batch.progress import JobProgress, Pace
from yalis.engine.interrupts import interrupts_held
from yalis.errors import YalisError, YalisFailure

if TYPE_CHECKING:
    from yalis.engine.llm import LLM

#: Requests in flight for each place in a step: enough that no step waits for the file to be read.
WINDOW = 4
#: Between two looks at the requests that run, which are many.
LOOK_SECONDS = 0.25


class ModelFailed(YalisFailure):
    """While it answered, such as by a rank that died; the results that were written stay."""


class BatchJob:
    """Opening it checks both files; run() does what is left. A context manager, since it holds a lock."""

    def __init__(
        self,
        source: Path,
        target: Path,
        model: str,
        defaults: dict[str, Any] | None = None,
        retry_errors: bool = False,
    ) -> None:
        """`model`: what tells it from others; `defaults`: sampling fields for lines that do not say them;
        `retry_errors`: take errors out of the result file, so that run() tries those lines again."""
        self.model, self.defaults = model, dict(defaults or {})
        with ExitStack() as opened:
            self._source = opened.enter_context(_open_source(source))
            self._wanted = wanted = survey(self._source, str(source), model, self.defaults)
            if target.exists() and os.path.samestat(os.fstat(self._source.fileno()), target.stat()):
                raise YalisError(f"{target} is also the input; give another file for the results")
            self._results = opened.enter_context(closing(ResultFile(target)))
            again = self._results.errors.keys() & wanted.keys() if retry_errors else set()
            _check_same(self._results, again, wanted, str(source))
            self._results.drop(again)
            self._files = opened.pop_all()
        held = self._results.digests.keys()
        #: ids in the result file that the input does not have; they stay where they are
        self.strangers = sorted(held - wanted.keys())
        done = len(held & wanted.keys())
        self.progress = JobProgress(len(wanted), done, len(self._results.errors.keys() & wanted.keys()), done, 0, 0.0)

    @property
    def locked(self) -> bool:
        """False where the file system has no locks, and a second job on the same file would not be noticed."""
        return self._results.locked

    @property
    def first_error(self) -> tuple[int, str] | None:
        """Line and message of the first line of the input whose result is an error."""
        lines = [(self._wanted[id].number, error) for id, error in self._results.errors.items() if id in self._wanted]
        return min(lines, default=None)

    def run(self, make_llm: Callable[[], LLM], report: Callable[[JobProgress], None] | None = None) -> JobProgress:
        """Answer every line that has no result yet; close() then makes the file durable.

        The model is made only when a line needs it.
        """
        llm: LLM | None = None
        running: dict[int, GoodLine] = {}
        pace, start, looked = Pace(), time.monotonic(), 0.0

        def tell(line: GoodLine | BadLine, fields: dict[str, Any], tokens: int = 0) -> None:
            with interrupts_held():  # or a Ctrl-C between the two would leave a result that is not counted
                self._results.write(line.custom_id, line.digest, fields)
                now = self.progress
                errors = now.errors + (fields["error"] is not None)
                self.progress = replace(now, done=now.done + 1, errors=errors, output_tokens=now.output_tokens + tokens)

        def advance(model: LLM) -> None:
            nonlocal looked
            try:
                finished = model.poll()
            except YalisFailure as failure:
                raise ModelFailed(str(failure)) from failure
            for request_id, output in finished:
                fields = {**answer(output), "error": None}
                tell(running.pop(request_id), fields, fields["output_tokens"])
                pace.finish(request_id, fields["output_tokens"])
            seconds = time.monotonic() - start
            if seconds - looked >= LOOK_SECONDS or not running:
                looked, self.progress = seconds, pace.look(self.progress, seconds, model.tokens_so_far())
            if report is not None:
                report(self.progress)

        try:
            for line in self._left():
                if isinstance(line, GoodLine):
                    if llm is None:
                        llm = make_llm()
                        start = time.monotonic()
                    while len(running) >= WINDOW * llm.config.max_num_seqs * llm.config.dp:
                        advance(llm)
                    try:
                        request_id = llm.submit(line.prompt, line.sampling)
                        running[request_id] = line
                        pace.submit(request_id, line.sampling.n * min(line.sampling.max_tokens, llm.max_model_len))
                        continue
                    except YalisFailure as failure:
                        raise ModelFailed(str(failure)) from failure
                    except YalisError as error:
                        line = BadLine(line.number, line.custom_id, str(error), line.digest)
                tell(line, {"error": {"line": line.number, "message": line.message}})
            while running and llm is not None:
                advance(llm)
        finally:
            if llm is not None:
                llm.close()
        return self.progress

    def _left(self) -> Iterator[GoodLine | BadLine]:
        for raw in read_raw(self._source):
            if raw.custom_id in self._results.digests:
                continue
            line = parse(raw, self.model, self.defaults)
            # Lines added or changed since the first reading wait for the next run.
            if self._wanted.get(line.custom_id) == Wanted(line.number, line.digest):
                yield line

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except YalisError:
            if error is None:  # else the first error is the one to hear about
                raise


def _check_same(results: ResultFile, skipped: set[str], wanted: dict[str, Wanted], source: str) -> None:
    """A result that is there must answer what the input asks now; that of line-5 may be of another line 5."""
    for custom_id, digest in results.digests.items():
        asked = wanted.get(custom_id)
        if asked is not None and asked.digest != digest and custom_id not in skipped:
            retry = ", or add --retry-errors" if custom_id in results.errors else ""
            raise YalisError(
                f"{results.path} has a result for {custom_id!r} of another prompt, model, dtype or sampling than line "
                f"{asked.number} of {source} asks for; give another file for the results, or remove it{retry}"
            )


def _open_source(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    if not file.seekable():
        file.close()
        raise YalisError(f"{path} can be read only once, and a job reads its input twice; save it to a file first")
    return file
