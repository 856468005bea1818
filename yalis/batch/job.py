"""A batch job: every line of a JSONL file gets one result, even if the job is interrupted and run again.

The input is read twice from the same open file. The first pass collects the ids, so that duplicates are refused before
any work. The second pass submits the requests and holds only a window of them at a time. Results are written in the
order in which they finish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from yalis.batch.formats import FlatFormat, OpenAIFormat, ResultFormat
from yalis.batch.input import (
    InvalidLine,
    LineKey,
    RequestLine,
    differing_parts,
    index_lines,
    is_earlier_error_digest,
    is_openai_input,
    parse,
    read_raw,
    same_request,
)
from yalis.batch.output import ResultFile
from yalis.batch.progress import JobProgress, ProgressEstimator
from yalis.batch.rescue import ResultsDisplaced
from yalis.engine.interrupts import interrupts_held
from yalis.errors import YalisError, YalisFailure
from yalis.log import get_logger

if TYPE_CHECKING:
    from yalis.engine.llm import LLM

log = get_logger(__name__)

#: Requests in flight for each one that can run at once, so that the engine never waits for the file to be read.
WINDOW = 4
#: Seconds between two progress updates, each of which visits every request in flight.
UPDATE_SECONDS = 0.25


class ModelFailed(YalisFailure):
    """The model failed during generation, for example because a rank died. Results written so far are kept."""


class BatchJob:
    """Opening a job checks both files; run() processes the lines without a result. Close it to release the lock."""

    def __init__(
        self,
        source: Path,
        target: Path,
        model: str,
        defaults: dict[str, Any] | None = None,
        retry_errors: bool = False,
        output_format: str | None = None,
        model_name: str | None = None,
    ) -> None:
        """Open and check the files.

        `model` identifies the model in digests. `defaults` are sampling fields for lines that do not set them.
        `retry_errors` removes error results from the result file, so that run() processes those lines again.
        `output_format` is "flat" or "openai"; None is the format of the results that the file has, or else that of
        the input. `model_name` is the model in results of the OpenAI format (default: `model`).
        """
        self.model, self.defaults = model, dict(defaults or {})
        with ExitStack() as opened:
            self._source = opened.enter_context(_open_source(source))
            input_format = "openai" if is_openai_input(self._source) else "flat"
            self._lines = lines = index_lines(self._source, str(source), model, self.defaults)
            if target.exists() and os.path.samestat(os.fstat(self._source.fileno()), target.stat()):
                raise YalisError(f"{target} is also the input; give another file for the results")
            self._results = opened.enter_context(closing(ResultFile(target)))
            to_retry = self._results.errors.keys() & lines.keys() if retry_errors else set()
            _check_digests(self._results, to_retry, lines, str(source), model)
            if lines and self._results.digests and not self._results.digests.keys() & lines.keys():
                raise YalisError(f"{target} has results of another input; give another file for the results")
            name = _choose_format(output_format, self._results, input_format)
            self._format: ResultFormat = OpenAIFormat(model_name or model) if name == "openai" else FlatFormat()
            self._results.remove(to_retry)
            self._files = opened.pop_all()
        result_ids = self._results.digests.keys()
        #: ids in the result file that are not in the input; their results are kept
        self.unknown_ids = sorted(result_ids - lines.keys())
        done = len(result_ids & lines.keys())
        errors = len(self._results.errors.keys() & lines.keys())
        self.progress = JobProgress(len(lines), done, errors, done, 0, 0.0)

    @property
    def locked(self) -> bool:
        """False if the file system has no locks, so that a second job on the same file would not be detected."""
        return self._results.locked

    @property
    def has_results(self) -> bool:
        """Whether the result file holds any result, also one whose id is not in the input."""
        return bool(self._results.digests)

    @property
    def first_error(self) -> tuple[int, str] | None:
        """Line number and message of the first input line whose result is an error."""
        errors = self._results.errors.items()
        return min(
            ((self._lines[id].line_number, message) for id, message in errors if id in self._lines), default=None
        )

    def run(
        self,
        make_llm: Callable[[], LLM],
        report: Callable[[JobProgress], None] | None = None,
        describe: Callable[[YalisError], str] = str,
    ) -> JobProgress:
        """Process every line without a result and return the final progress; close() then syncs the file to disk.

        `make_llm` is called only if a line needs the model. `report` is called after every step. `describe` returns the
        message to write for a line that the model refuses.
        """
        llm: LLM | None = None
        running: dict[int, RequestLine] = {}
        estimator, start, last_update = ProgressEstimator(), time.monotonic(), 0.0

        def write(line: RequestLine | InvalidLine, fields: dict[str, Any], tokens: int = 0) -> None:
            with interrupts_held():  # a Ctrl-C between the two would leave a result that is not counted
                self._results.write(line.custom_id, line.digest, fields)
                now = self.progress
                errors = now.errors + (fields["error"] is not None)
                self.progress = replace(now, done=now.done + 1, errors=errors, output_tokens=now.output_tokens + tokens)

        def step(model: LLM) -> None:
            nonlocal last_update
            try:
                finished = model.poll()
            except YalisFailure as failure:
                raise ModelFailed(str(failure)) from failure
            for request_id, output in finished:
                line, tokens = running.pop(request_id), sum(len(one.token_ids) for one in output.completions)
                write(line, self._format.result(line, output, model.tokenizer), tokens)
                estimator.finish(request_id, tokens)
            seconds = time.monotonic() - start
            if seconds - last_update >= UPDATE_SECONDS or not running:
                last_update = seconds
                self.progress = estimator.update(self.progress, seconds, model.tokens_so_far())
            if report is not None:
                report(self.progress)

        try:
            for line in self._lines_without_result():
                if isinstance(line, RequestLine):
                    if llm is None:
                        llm = make_llm()
                        start = time.monotonic()
                    while len(running) >= WINDOW * llm.config.max_num_seqs * llm.config.dp:
                        step(llm)
                    try:
                        request_id = llm.submit(line.prompt, line.sampling)
                        running[request_id] = line
                        max_tokens = min(line.sampling.max_tokens, llm.max_model_len)
                        estimator.submit(request_id, line.sampling.n * max_tokens)
                        continue
                    except YalisFailure as failure:
                        raise ModelFailed(str(failure)) from failure
                    except YalisError as error:
                        line = InvalidLine(line.line_number, line.custom_id, describe(error), line.digest)
                write(line, self._format.error(line))
            while running and llm is not None:
                step(llm)
        finally:
            if llm is not None:
                llm.close()
        return self.progress

    def _lines_without_result(self) -> Iterator[RequestLine | InvalidLine]:
        for raw in read_raw(self._source):
            if raw.custom_id in self._results.digests:
                continue
            line = parse(raw, self.model, self.defaults)
            # Lines that were added or changed since the first pass are left to the next run.
            if self._lines.get(line.custom_id) == LineKey.of(line):
                yield line

    def verify_output(self) -> None:
        """Raise ResultsDisplaced if the result file was removed, replaced or truncated since it was opened."""
        self._results.verify()

    def close(self) -> None:
        """Sync and verify the result file, and release its lock. Raises ResultsDisplaced as verify_output() does."""
        self._files.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except YalisError as failure:
            if error is None:  # otherwise the first error is the one to raise
                raise
            if isinstance(failure, ResultsDisplaced):  # says where the results are now
                log.warning("%s", failure)


def _check_digests(results: ResultFile, to_retry: set[str], lines: dict[str, LineKey], source: str, model: str) -> None:
    """Raise YalisError if an existing result was made for a different request with the same id, such as line-5."""
    for custom_id, digest in results.digests.items():
        line = lines.get(custom_id)
        if line is None or custom_id in to_retry or same_request(line.digest, digest):
            continue
        error = results.errors.get(custom_id)
        if error is not None and not line.valid and is_earlier_error_digest(digest, model, error):
            continue
        retry = "" if error is None else ", or add --retry-errors"
        raise YalisError(
            f"{results.path} has a result for {custom_id!r} with another {differing_parts(line.digest, digest)} than "
            f"line {line.line_number} of {source}; give another file for the results, or remove {results.path}{retry}"
        )


def _choose_format(given: str | None, results: ResultFile, input_format: str) -> str:
    """Return the format of new results. A file has one format: that of the results it already has."""
    if results.format is None:
        return given or input_format
    if given not in (None, results.format):
        raise YalisError(
            f"{results.path} has results in the {results.format} format, not {given}; omit --format, or give another "
            "file for the results"
        )
    return results.format


def _open_source(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    if not file.seekable():
        file.close()
        raise YalisError(f"{path} can be read only once, and a job reads its input twice; save it to a file first")
    return file
