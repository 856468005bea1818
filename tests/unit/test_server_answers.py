"""What answers contain, read with the openai client: usage, log-probabilities, echo, several prompts, defaults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.server import RunningServer, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams

PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


def test_usage_and_log_probabilities_of_a_chat(server: RunningServer) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    whole = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, **settings)
    expected = server.llm.chat(MESSAGES, SamplingParams(max_tokens=8, logprobs=3), progress=False)[0]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(expected.prompt_token_ids), 8)
    found = whole.choices[0].logprobs
    assert found is not None
    assert [round(one.logprob, 4) for one in found.content or ()] == [
        round(one.logprob, 4) for one in expected.logprobs or ()
    ]
    assert all(len(one.top_logprobs) == 3 for one in found.content or ())
    stream = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **settings
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or ()]
    assert [one.token for one in streamed] == [one.token for one in found.content or ()]


def test_the_async_client_gets_many_answers_at_once(server: RunningServer) -> None:
    async def ask(client: AsyncOpenAI, seed: int, stream: bool) -> str:
        settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "seed": seed, "max_tokens": 20}
        if not stream:
            return (await client.completions.create(**settings)).choices[0].text
        return "".join(
            [chunk.choices[0].text async for chunk in await client.completions.create(stream=True, **settings)]
        )

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed, stream) for stream in (True, False) for seed in range(20)))

    answers = asyncio.run(ask_all())
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=20) for seed in range(20)]
    expected = [output.text for output in server.llm.generate([PROMPT] * 20, params, progress=False)]
    assert answers == expected * 2


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_in_order(server: RunningServer, stream: bool) -> None:
    prompts = ["one", "two", "three"]
    settings: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "temperature": 1, "seed": 4}
    answer: Any = server.openai.completions.create(**settings, max_tokens=6, stream=stream)
    texts: dict[int, str] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    outputs = server.llm.generate(prompts, SamplingParams(n=2, temperature=1, seed=4, max_tokens=6), progress=False)
    assert [texts[index] for index in range(6)] == [one.text for output in outputs for one in output.completions]


def test_token_ids_as_prompts(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()
    assert ids["count"] == len(ids["tokens"])
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": PROMPT}
    text, both = ({"temperature": 0, "prompt": prompt} for prompt in (PROMPT, [ids["tokens"], ids["tokens"]]))
    answers = [choice["text"] for choice in server.post("/v1/completions", both).json()["choices"]]
    assert answers == [server.post("/v1/completions", text).json()["choices"][0]["text"]] * 2


def test_tokenize_uses_the_chat_template(server: RunningServer) -> None:
    found = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert server.llm.tokenizer is not None
    assert found == server.llm.tokenizer.encode_chat(MESSAGES)


def test_echo_scores_the_prompt(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 2}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    scored = server.llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=2), progress=False)[0]
    assert choice["text"] == PROMPT
    expected = [None if one is None else round(one.logprob, 4) for one in scored.prompt_logprobs or ()]
    assert [value and round(value, 4) for value in choice["logprobs"]["token_logprobs"]] == expected
    assert choice["logprobs"]["text_offset"] == list(range(len(PROMPT)))
    whole = server.post("/v1/completions", {**body, "max_tokens": 3, "temperature": 0}).json()["choices"][0]
    assert len(whole["logprobs"]["tokens"]) == len(PROMPT) + 3
    assert whole["text"].startswith(PROMPT)


def test_streamed_echo_begins_with_the_prompt(server: RunningServer) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "echo": True, "temperature": 0, "max_tokens": 5}
    whole = server.openai.completions.create(**settings).choices[0].text
    chunks = list(server.openai.completions.create(stream=True, **settings))
    assert chunks[0].choices[0].text == PROMPT
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_prompt_logprobs_have_the_form_of_vllm(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body).json()
    first, second, *_ = answer["prompt_logprobs"]
    assert first is None
    assert str(answer["prompt_token_ids"][1]) in second
    assert next(iter(second.values())).keys() == {"logprob", "rank", "decoded_token"}


def test_without_max_tokens(server: RunningServer) -> None:
    """A chat answer may fill the context, a completion has 16 tokens."""
    body = {"temperature": 0, "ignore_eos": True}
    chat = server.post("/v1/chat/completions", {**body, "model": "tiny", "messages": MESSAGES}).json()
    assert chat["usage"]["total_tokens"] == server.llm.max_model_len
    assert chat["choices"][0]["finish_reason"] == "length"
    text = server.post("/v1/completions", {**body, "prompt": PROMPT}).json()
    assert text["usage"]["completion_tokens"] == 16


def test_generation_config_overrides_the_defaults(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "generation_config.json"
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({"do_sample": True, "temperature": 0.3, "top_k": 5, "max_new_tokens": 7}))
    with LLM(str(tmp_path), threads=1, kv_memory=0.05) as llm, running_server(llm) as server:
        body = {"model": server.model, "messages": MESSAGES, "seed": 2}
        found = server.post("/v1/chat/completions", body).json()["choices"][0]
        params = SamplingParams(temperature=0.3, top_k=5, max_tokens=7, seed=2)
        assert found["message"]["content"] == llm.chat(MESSAGES, params, progress=False)[0].text
        explicit = server.post("/v1/chat/completions", {**body, "max_tokens": 3}).json()
        assert explicit["usage"]["completion_tokens"] <= 3
