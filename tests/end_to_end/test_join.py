"""An engine whose two workers join over TCP, with everything as a user starts it: `pagewire worker`, `LLM`."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from pagewire import LLM, LoRARequest, SamplingParams
from pagewire.ipc.join.group_key import GroupKey
from tests.cli.command import start
from tests.workers.random_adapters import make_tensors, write

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["The", "def main():", "Once upon a time"]


def test_workers_join_and_are_replaced(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    key = tmp_path / "key"
    GroupKey.read_or_make(key)
    options = ["worker", "--join", address, "--key", str(key)]
    shapes = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 704)}
    adapter = LoRARequest("random", 1, str(write(tmp_path / "adapter", tensors=make_tensors(0, shapes))))
    first = start(*options, "--rank", "1", stderr=None)
    monkeypatch.setenv("RANK", "0")
    second = start(*options, stderr=None, env=dict(os.environ))
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with LLM(
        "demo",
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        num_threads=1,
        tensor_parallel_size=2,
        distributed_executor_backend="join",
        join_address=address,
        join_key=str(key),
        enable_lora=True,
    ) as joined:
        adapted = []
        for _ in range(2):
            outputs = joined.generate(
                [*PROMPTS, PROMPTS[0]], GREEDY, lora_request=[None, None, None, adapter], use_tqdm=False
            )
            *plain, last = [output.outputs[0].token_ids for output in outputs]
            assert plain == expected
            adapted.append(last)
            assert len(joined.collective_rpc("ping")) == 2
            workers = [child for agent in (first, second) for child in psutil.Process(agent.pid).children()]
            assert len(workers) == 2
            os.kill(workers[0].pid, signal.SIGKILL)
    assert adapted[0] == adapted[1] != expected[0]  # read by both workers, and again after one was lost
    assert [agent.wait(60) for agent in (first, second)] == [0, 0]
    assert not any(worker.is_running() for worker in workers)
