"""/metrics, read with the parser of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator

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
    between = gained["yalis:inter_token_latency_seconds_sum"]
    first, total = gained["yalis:time_to_first_token_seconds_sum"], gained["yalis:e2e_request_latency_seconds_sum"]
    assert first + between == pytest.approx(total)
    assert now["yalis:num_requests_running"] == now["yalis:num_requests_waiting"] == 0
    assert now["yalis:kv_cache_usage_perc"] == 0


def test_a_histogram_counts_each_value_up_to_its_bound() -> None:
    histogram = Histogram("x", "", (1.0, 2.0))
    histogram.observe_all([0.5, 1.0, 1.5, 9.0])
    samples = {sample.labels.get("le", sample.name): sample.value for sample in histogram.family({}).samples}
    assert samples == {"1.0": 2, "2.0": 3, "+Inf": 4, "yalis:x_count": 4, "yalis:x_sum": 12.0}
