"""Checks the messages of a conversation, with the same rules in Python and in batch files."""

from __future__ import annotations

from typing import Any

from yalis.errors import YalisError
from yalis.types import Message


def check_messages(messages: Any) -> list[Message]:
    """Return the messages with their content as one string; raise YalisError for a message that is not text.

    Content may be a list of parts, as in the OpenAI API: {"type": "text", "text": ...}. Their texts are joined.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise YalisError('messages is not a list with at least one message; give [{"role": "user", "content": "..."}]')
    return [_check_message(index, message) for index, message in enumerate(messages, 1)]


def _check_message(index: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise YalisError(f'message {index} has no role; give {{"role": "user", "content": "..."}}')
    content = message.get("content")
    if isinstance(content, (list, tuple)):  # the API's form for messages that mix text and images
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise YalisError(f"message {index} has a part that is not text; only text is supported")
        content = "".join(texts)
    if content is None and message.get("tool_calls"):  # a template may write the calls instead
        return dict(message)
    if not isinstance(content, str):
        raise YalisError(f"message {index} has no content; give it a text")
    return {**message, "content": content}
