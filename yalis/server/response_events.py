"""The output of /v1/responses: its items, and the events that stream them.

The complete response and the last event of a stream are made by the same code, so they cannot differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from yalis.server.answers import encode
from yalis.server.tools.deltas import ArgumentsDelta, CallStart, ContentDelta, ParsedDelta

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseEvents:
    """Builds the output items of one response from parsed deltas, and encodes the events about them.

    `response`: the response without output, with the status "in_progress".
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = response
        self._output: list[Item] = []
        self._parts: list[str] = []  # of the text or the arguments of the open item
        self._logprobs: list[dict[str, Any]] = []  # of the open message
        self._open: Item | None = None  # the last item, while it may continue
        self._sequence_number = 0

    def start(self) -> bytes:
        return self._about_response("response.created") + self._about_response("response.in_progress")

    def add(self, deltas: Iterable[ParsedDelta], logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Return the events of new output. `logprobs` are those of its tokens."""
        events = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                events.append(self._add_text(delta.text, list(logprobs)))
                logprobs = ()
            elif isinstance(delta, CallStart):
                events.append(self._start_call(delta))
            else:
                events.append(self._add_arguments(delta))
        if logprobs:  # of tokens whose text is held back
            events.append(self._add_text("", list(logprobs)))
        return b"".join(events)

    def finish(self, usage: dict[str, Any], completed_at: int, reason: str | None) -> bytes:
        """Return the last events. `reason`: why the response is incomplete; None if it is complete."""
        status = "completed" if reason is None else "incomplete"
        events = b"" if self._output else self._start_message()
        events += self._close(status)
        self._response.update(status=status, output=self._output, usage=usage)
        if reason is None:
            self._response["completed_at"] = completed_at
        else:
            self._response["incomplete_details"] = {"reason": reason}
        return events + self._about_response(f"response.{status}")

    def fail(self, error: dict[str, Any]) -> bytes:
        """Return the last events of a response that an error ended: in the API's own form, and as clients raise it."""
        self._close("incomplete")
        failure = {"code": "server_error", "message": error["message"]}
        self._response.update(status="failed", output=self._output, error=failure)
        shown = {name: error[name] for name in ("code", "message", "param")}
        return self._about_response("response.failed") + self._event("error", **shown, error=error)

    @property
    def response(self) -> dict[str, Any]:
        """The response; complete after finish()."""
        return self._response

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if self._open is None or self._open["type"] != "message":
            events = self._start_message()
        self._parts.append(text)
        self._logprobs += logprobs
        return events + self._about_part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _start_message(self) -> bytes:
        item = {"type": "message", "id": new_id("msg"), "status": "in_progress", "role": "assistant", "content": []}
        return self._open_item(item) + self._about_part("response.content_part.added", part=_text_part("", []))

    def _start_call(self, start: CallStart) -> bytes:
        item = {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": start.id,
            "name": start.name,
            "arguments": "",
            "status": "in_progress",
        }
        return self._open_item(item)

    def _add_arguments(self, delta: ArgumentsDelta) -> bytes:
        self._parts.append(delta.text)
        return self._about_item("response.function_call_arguments.delta", delta=delta.text)

    def _open_item(self, item: Item) -> bytes:
        events = self._close("completed")
        self._output.append(item)
        self._open = item
        return events + self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, status: str) -> bytes:
        """Complete the open item, if there is one."""
        item = self._open
        if item is None:
            return b""
        text, logprobs = "".join(self._parts), self._logprobs
        item["status"] = status
        if item["type"] == "message":
            part = _text_part(text, logprobs)
            item["content"] = [part]
            events = self._about_part("response.output_text.done", text=text, logprobs=logprobs)
            events += self._about_part("response.content_part.done", part=part)
        else:
            item["arguments"] = text
            events = self._about_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        self._open, self._parts, self._logprobs = None, [], []
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _about_response(self, kind: str) -> bytes:
        return self._event(kind, response=self._response)

    def _about_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _about_part(self, kind: str, **fields: Any) -> bytes:
        return self._about_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: {encode(content)}\n\n".encode("ascii")


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
