"""Prompts of embeddings in the whole core, with a fake worker process."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import media_of
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Submit
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from tests.engine_core.fake_worker import EMBEDDING_SIZE

NUM_TOKENS = 40


def prompt(value: int) -> Prompt:
    data = bytes([value]) * (NUM_TOKENS * EMBEDDING_SIZE * 2)
    return Prompt([0] * NUM_TOKENS, media_of(Tensor("float16", (NUM_TOKENS, EMBEDDING_SIZE), data)))


def test_contents_are_held_while_requests_run_also_over_a_workers_death(start_core: Callable) -> None:
    """And not longer: what ends, or is aborted, makes room. A wrong name fails its request alone."""
    running = start_core(enable_prompt_embeds=True)
    frontend = running.frontend()
    info = frontend.attach().info
    assert (info.embeddings.size, info.embeddings.prompts, info.embeddings.adapters) == (4, True, False)
    contents = running.serving.intake._contents
    params = SamplingParams(max_tokens=80)
    requests = [Request(key, f"r{key}", prompt(1 + key % 2), params, 7) for key in range(4)]
    bad = prompt(9)
    bad.media[0] = msgspec.structs.replace(bad.media[0], name=requests[0].prompt.media[0].name)
    frontend.say(Submit([*requests, Request(9, "bad", bad, params, 7)]))
    frontend.finish((9, 0))
    assert "is not that of their content" in (frontend.ends[9, 0].error or "")
    assert contents.num_bytes == 2 * NUM_TOKENS * EMBEDDING_SIZE * 2
    frontend.kill_worker()
    frontend.finish(*((key, 0) for key in range(4)))
    assert frontend.outputs[0, 0] == frontend.outputs[2, 0] and len(frontend.outputs[1, 0]) == 80
    status = frontend.status()
    assert status["num_free_blocks"] == status["num_blocks"]
    del requests, bad
    assert contents.num_bytes == 0


def test_only_the_first_stage_gets_embeddings(start_core: Callable) -> None:
    frontend = start_core(pipeline_parallel_size=3, enable_prompt_embeds=True).frontend()
    frontend.attach()
    frontend.say(Submit([Request(1, "r1", prompt(1), SamplingParams(max_tokens=4), 7)]))
    frontend.finish((1, 0))
    assert frontend.call("collective_rpc", "num_embeddings").result == [NUM_TOKENS, 0, 0]
