"""An offline job: every line of a JSONL file answered once, whatever interrupts it.

The input is read twice from the same open file: first its ids, so that a duplicate is refused before any work, then its
requests, of which only a window is held at a time. Results are written in the order in which they finish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from yalis.engine.offline_input import BadLine, GoodLine, check_ids, parse, read_raw
from yalis.engine.offline_output import ResultFile, answer
from yalis.errors import YalisError

if TYPE_CHECKING:
    from yalis.engine.llm import LLM

#: Requests in flight for each place in a step: enough that no step waits for the file to be read.
WINDOW = 4


@dataclass(frozen=True)
class JobProgress:
    total: int  # lines of the input that ask for something
    done: int  # of them, in the result file
    errors: int  # of those in the file, results that are errors
    resumed: int  # in the file before this run
    output_tokens: int  # of this run
    seconds: float  # since this run's first request

    @property
    def requests_per_s(self) -> float:
        return (self.done - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None until a first result has shown the rate."""
        return (self.total - self.done) / self.requests_per_s if self.requests_per_s > 0 else None


class OfflineJob:
    """Opening it checks both files; run() does what is left. A context manager, since it holds a lock."""

    def __init__(self, source: Path, target: Path, defaults: dict[str, Any] | None = None) -> None:
        """`defaults`: sampling fields for lines that do not say them."""
        self.defaults = dict(defaults or {})
        self._source = _open_source(source)
        try:
            self._wanted = wanted = check_ids(self._source, str(source))
            if target.exists() and os.path.samestat(os.fstat(self._source.fileno()), target.stat()):
                raise YalisError(f"{target} is also the input; give another file for the results")
            self._results = ResultFile(target)
        except BaseException:
            self._source.close()
            raise
        #: ids in the result file that the input does not have; they stay where they are
        self.strangers = sorted(self._results.ids - wanted.keys())
        done = len(wanted) - len(wanted.keys() - self._results.ids)
        self.progress = JobProgress(len(wanted), done, self._results.errors, done, 0, 0.0)

    @property
    def locked(self) -> bool:
        """False where the file system has no locks, and a second job on the same file would not be noticed."""
        return self._results.locked

    @property
    def finished(self) -> bool:
        return self.progress.done == self.progress.total

    def run(self, make_llm: Callable[[], LLM], report: Callable[[JobProgress], None] | None = None) -> JobProgress:
        """Answer every line that has no result yet; close() then makes the file durable.

        The model is made only when a line needs it.
        """
        llm: LLM | None = None
        running: dict[int, GoodLine] = {}
        start = time.monotonic()

        def tell(custom_id: str, fields: dict[str, Any], tokens: int = 0) -> None:
            self._results.write(custom_id, fields)
            done, tokens = self.progress.done + 1, self.progress.output_tokens + tokens
            self.progress = replace(self.progress, done=done, errors=self._results.errors, output_tokens=tokens)

        def advance(model: LLM) -> None:
            for request_id, output in model.poll():
                fields = {**answer(output), "error": None}
                tell(running.pop(request_id).custom_id, fields, fields["output_tokens"])
            self.progress = replace(self.progress, seconds=time.monotonic() - start)
            if report is not None:
                report(self.progress)

        try:
            for line in self._left():
                if isinstance(line, GoodLine):
                    if llm is None:
                        llm = make_llm()
                        start = time.monotonic()
                    while len(running) >= WINDOW * llm.config.max_num_seqs:
                        advance(llm)
                    try:
                        running[llm.submit(line.prompt, line.sampling)] = line
                        continue
                    except YalisError as error:
                        line = BadLine(line.number, line.custom_id, str(error))
                tell(line.custom_id, {"error": {"line": line.number, "message": line.message}})
            while running and llm is not None:
                advance(llm)
        finally:
            if llm is not None:
                llm.close()
        return self.progress

    def _left(self) -> Iterator[GoodLine | BadLine]:
        for line in read_raw(self._source):
            # Lines added since the ids were checked wait for the next run.
            if line.custom_id not in self._results.ids and self._wanted.get(line.custom_id) == line.number:
                yield parse(line, self.defaults)

    def close(self) -> None:
        self._source.close()
        self._results.close()

    def __enter__(self) -> OfflineJob:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except YalisError:
            if error is None:  # else the first error is the one to hear about
                raise


def _open_source(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    if not file.seekable():
        file.close()
        raise YalisError(f"{path} can be read only once, and a job reads its input twice; save it to a file first")
    return file
