"""500 requests of the server's soak test (`make serve-soak` sends 10,000): nothing leaks and no token is wrong."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.server import running_server
from tests.soak.serve_load import KINDS, ServeLoad, start_stopped_client
from tests.soak.serve_requests import make_specs
from tests.tiny_chat import save_tiny_chat
from yalis import LLM


def test_500_requests_with_clients_that_leave_stall_and_stop(tmp_path: Path) -> None:
    model = str(save_tiny_chat(tmp_path, max_position=512))
    with LLM(model, threads=1, kv_blocks=100, max_num_seqs=8) as llm:
        specs = make_specs(llm, 40, seed=1)
        with running_server(llm, served_model_name="tiny", max_queue=8, timeout=2.0) as server:
            port = int(server.url.rpartition(":")[2])
            load = ServeLoad(port, specs, seed=2, workers=20)
            long = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "temperature": 0}
            stopped = start_stopped_client(port, long, 2)
            try:
                asyncio.run(load.run(500))
                assert load.problems == []
                end = time.monotonic() + 10
                while server.blocks_in_use() or server.state.async_llm.num_open:
                    assert time.monotonic() < end, (server.blocks_in_use(), server.state.async_llm.num_open)
                    time.sleep(0.01)
            finally:
                stopped.kill()
                stopped.wait()
    print(dict(load.counts))
    assert sum(load.counts[kind] for kind in KINDS) == 500
    assert all(load.counts[name] for name in (*KINDS, "complete", "left", "refused with 429"))
