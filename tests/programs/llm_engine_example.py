import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def main(args: argparse.Namespace) -> None:
    engine_args = EngineArgs.from_cli_args(args)
    engine = LLMEngine.from_engine_args(engine_args)
    waiting = [
        ("A robot may not injure", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (
            "What is the meaning?",
            SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        ),
        ("It is only with the heart", SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0)),
    ]
    request_id = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, sampling_params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(request_output)
    print(engine.get_model_config().max_model_len, engine.get_decoding_config())


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Demo on using the LLMEngine class directly")
    parser = EngineArgs.add_cli_args(parser)
    main(parser.parse_args())
