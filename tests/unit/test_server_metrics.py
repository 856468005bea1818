"""/metrics, read with the parser of prometheus_client."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server import RunningServer, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM
from yalis.server.metrics import Histogram


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


def metrics(server: RunningServer) -> dict[str, float]:
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            rest = ",".join(value for name, value in sample.labels.items() if name != "model_name")
            found[sample.name + (f"[{rest}]" if rest else "")] = sample.value
    return found


def test_the_numbers_are_those_of_the_requests(server: RunningServer) -> None:
    before = metrics(server)
    prompt = list(range(64))
    for _ in range(2):  # the second finds the first's blocks in the prefix cache
        body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "n": 2}
        assert server.post("/v1/completions", body).status_code == 200
    now = metrics(server)
    gained = {name: value - before[name] for name, value in now.items()}
    assert gained["yalis:prompt_tokens_total"] == 4 * 64
    assert gained["yalis:generation_tokens_total"] == 40
    assert gained["yalis:prefix_cache_queries_total"] == 4 * 64
    assert 48 <= gained["yalis:prefix_cache_hits_total"] < 4 * 64
    assert gained["yalis:request_success_total[length]"] == 4
    assert gained["yalis:request_success_total[abort]"] == gained["yalis:request_aborts_total"] == 0
    assert gained["yalis:time_to_first_token_seconds_count"] == 4
    assert gained["yalis:inter_token_latency_seconds_count"] == 4 * 9
    assert gained["yalis:e2e_request_latency_seconds_count"] == 4
    assert gained["yalis:request_prompt_tokens_sum"] == 4 * 64
    assert gained["yalis:request_prompt_tokens_bucket[50.0]"] == 0
    assert gained["yalis:request_prompt_tokens_bucket[100.0]"] == 4
    assert gained["yalis:request_generation_tokens_sum"] == 40
    assert gained["yalis:request_params_max_tokens_sum"] == 40
    cached = gained["yalis:prefix_cache_hits_total"]
    assert gained["yalis:prompt_tokens_cached_total"] == cached
    assert gained["yalis:request_prefill_kv_computed_tokens_sum"] == 4 * 64 - cached
    # Two requests, each with two completions.
    assert (gained["yalis:request_params_n_count"], gained["yalis:request_params_n_sum"]) == (2, 4)
    assert gained["yalis:request_max_num_generation_tokens_count"] == 2
    assert gained["yalis:request_max_num_generation_tokens_sum"] == 20
    assert gained["yalis:request_decode_time_seconds_sum"] == pytest.approx(
        gained["yalis:inter_token_latency_seconds_sum"]
    )
    between = gained["yalis:inter_token_latency_seconds_sum"]
    first, total = gained["yalis:time_to_first_token_seconds_sum"], gained["yalis:e2e_request_latency_seconds_sum"]
    assert first + between == pytest.approx(total)
    assert now["yalis:num_requests_running"] == now["yalis:num_requests_waiting"] == 0
    assert now["yalis:kv_cache_usage_perc"] == 0


def test_a_cancelled_request_counts_its_tokens_but_not_as_a_success(server: RunningServer) -> None:
    before = metrics(server)
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
    end = time.monotonic() + 10
    while (now := metrics(server))["yalis:request_aborts_total"] == before["yalis:request_aborts_total"]:
        assert time.monotonic() < end, "the request was not cancelled"
    gained = {name: value - before[name] for name, value in now.items()}
    assert gained["yalis:request_success_total[abort]"] == 1
    assert gained["yalis:time_to_first_token_seconds_count"] == 1
    tokens = gained["yalis:generation_tokens_total"]
    assert 2 <= tokens < 200
    # A token of a step that was in flight may not have reached the request.
    assert tokens - 2 <= gained["yalis:inter_token_latency_seconds_count"] <= tokens - 1
    for name in ("e2e_request_latency_seconds", "request_generation_tokens", "request_params_n"):
        assert gained[f"yalis:{name}_count"] == 0


#: Metrics of vLLM that have no counterpart here, and why.
NOT_OURS = {
    "corrupted_requests": "logits are not searched for NaN",
    "engine_sleep_state": "there is no sleep mode",
    "external_prefix_cache_hits": "there is no KV connector",
    "external_prefix_cache_queries": "there is no KV connector",
    "iteration_tokens_total": "steps are not measured one by one",
    "kv_block_idle_before_evict_seconds": "blocks have no times",
    "kv_block_lifetime_seconds": "blocks have no times",
    "kv_block_reuse_gap_seconds": "blocks have no times",
    "lora_requests_info": "there are no LoRA adapters",
    "mm_cache_hits": "prompts are text",
    "mm_cache_queries": "prompts are text",
    "num_requests_waiting_by_reason": "requests wait for capacity only",
    "prompt_tokens_by_source": "prompt_tokens less prompt_tokens_cached were computed",
    "request_inference_time_seconds": "the time at which a request is scheduled is not kept",
    "request_prefill_time_seconds": "the time at which a request is scheduled is not kept",
    "request_queue_time_seconds": "the time at which a request is scheduled is not kept",
}
#: The metrics of vLLM 0.24 that have one.
OURS = {
    "e2e_request_latency_seconds", "generation_tokens", "inter_token_latency_seconds", "kv_cache_usage_perc",
    "num_preemptions", "num_requests_running", "num_requests_waiting", "prefix_cache_hits", "prefix_cache_queries",
    "prompt_tokens", "prompt_tokens_cached", "request_decode_time_seconds", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_max_tokens", "request_params_n",
    "request_prefill_kv_computed_tokens", "request_prompt_tokens", "request_success",
    "request_time_per_output_token_seconds", "time_to_first_token_seconds",
}  # fmt: skip


def test_names_are_those_of_vllm(server: RunningServer) -> None:
    families = text_string_to_metric_families(server.get("/metrics").text)
    names = {family.name.removeprefix("yalis:") for family in families}
    assert names == OURS | {"request_aborts"}
    assert not names & set(NOT_OURS)


def test_a_histogram_counts_each_value_up_to_its_bound() -> None:
    histogram = Histogram("x", "", (1.0, 2.0))
    histogram.observe_all([0.5, 1.0, 1.5, 9.0])
    samples = {sample.labels.get("le", sample.name): sample.value for sample in histogram.family({}).samples}
    assert samples == {"1.0": 2, "2.0": 3, "+Inf": 4, "yalis:x_count": 4, "yalis:x_sum": 12.0}
