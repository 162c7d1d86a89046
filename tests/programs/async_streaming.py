import asyncio

from vllm import AsyncLLMEngine, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine as Same
from vllm.sampling_params import RequestOutputKind
from vllm.utils import random_uuid
from vllm.v1.engine.async_llm import AsyncLLM


async def main() -> None:
    engine_args = AsyncEngineArgs(model="meta-llama/Llama-3.2-1B-Instruct", disable_log_requests=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        sampling_params = SamplingParams(
            max_tokens=10, temperature=0.8, top_p=0.95, output_kind=RequestOutputKind.DELTA
        )
        async for output in engine.generate(
            request_id="request-1",
            prompt="The future of artificial intelligence is",
            sampling_params=sampling_params,
        ):
            for completion in output.outputs:
                print(completion.text, end="", flush=True)
            if output.finished:
                break
    finally:
        engine.shutdown()

    engine = AsyncLLMEngine.from_engine_args(engine_args)
    assert AsyncLLMEngine is Same and engine.limit_concurrency
    example_input = {"prompt": "What is LLM?", "temperature": 0.0, "request_id": random_uuid()}
    results_generator = engine.generate(
        example_input["prompt"],
        SamplingParams(temperature=example_input["temperature"]),
        example_input["request_id"],
    )
    final_output = None
    async for request_output in results_generator:
        final_output = request_output
    async for request_output in engine.generate(None, SamplingParams(max_tokens=2), "ids", [5, 6, 7]):
        assert request_output.prompt_token_ids == [5, 6, 7]
    print(final_output, (await engine.get_model_config()).model)
    engine.shutdown()


asyncio.run(main())
