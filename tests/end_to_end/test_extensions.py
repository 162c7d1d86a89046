"""Code of the operator in the workers of an engine: logits processors, and methods that are called by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagewire import LLM, SamplingParams
from pagewire.frontend.requests.outputs import BatchError
from tests.end_to_end.conftest import KV_BYTES
from tests.workers.sample.own_processors import Weights

CODE = "tests.workers.sample.own_processors"
PROMPT = "import re\n" * 5
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def extended() -> Iterator[LLM]:
    """An engine that drafts, with processors by name, and methods of workers."""
    with LLM(
        "demo",
        dtype="float32",
        kv_cache_memory_bytes=KV_BYTES,
        logits_processors=[f"push={CODE}:Pusher", f"later={CODE}:OnlyLater", f"bad={CODE}:without_result"],
        worker_extension_cls=Weights,
        speculative_model="[ngram]",
        num_speculative_tokens=4,
    ) as engine:
        yield engine


def tokens(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_requests_name_processors(extended: LLM, llm: LLM) -> None:
    """Others in the batch keep their tokens, and drafts change none: alone, a step of the same is another batch."""
    pushed = PARAMS.clone()
    pushed.logits_processors, pushed.extra_args = ["push", "later"], {"push": 8.0}
    [plain] = tokens(llm, PARAMS)
    alone = tokens(extended, pushed)[0]
    assert tokens(extended, PARAMS, pushed, PARAMS) == [plain, alone, plain]
    assert alone != plain
    weaker = pushed.clone()
    weaker.extra_args = {"push": 1.0}
    assert tokens(extended, weaker) != [alone]


def test_an_error_of_a_processor_ends_the_request(extended: LLM) -> None:
    bad = PARAMS.clone()
    bad.logits_processors = ["bad"]
    with pytest.raises(
        BatchError, match="the logits processor bad failed: TypeError: it must return a tens"
    ) as error:
        extended.generate([PROMPT] * 2, [PARAMS, bad], use_tqdm=False)
    assert len(error.value.outputs[0].outputs[0].token_ids) == PARAMS.max_tokens


def test_an_unknown_processor(extended: LLM, llm: LLM) -> None:
    params = SamplingParams(logits_processors=["os:system"])
    with pytest.raises(ValueError, match="'os:system' is unknown: this engine has push, later, bad"):
        tokens(extended, params)
    with pytest.raises(ValueError, match="'os:system' is unknown: this engine has none by name"):
        tokens(llm, params)


def test_methods_of_workers(extended: LLM) -> None:
    size = extended.llm_engine.session.info.vocab_size
    assert extended.collective_rpc("rank_and_vocabulary", args=(5,), kwargs={"scale": 0.5}) == [[5, size / 2]]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'add'"):
        extended.collective_rpc("rank_and_vocabulary")
    with pytest.raises(TypeError, match="unsendable: the result cannot be sent"):
        extended.collective_rpc("unsendable")
    with pytest.raises(ValueError, match=r"no method '_worker'.* rank_and_vocabulary, .* unsendable"):
        extended.collective_rpc("_worker")
