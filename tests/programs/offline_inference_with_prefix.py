from time import time

from vllm import LLM, SamplingParams

prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. " * 3
prompts = [prefix + prompt for prompt in ("Hello, my name is", "The capital of France is")]
sampling_params = SamplingParams(temperature=0.0)
regular_llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4)
prefix_cached_llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True, gpu_memory_utilization=0.4)
texts = [output.outputs[0].text for output in regular_llm.generate(prompts, sampling_params)]
prefix_cached_llm.generate(prompts[0], sampling_params)
start = time()
outputs = prefix_cached_llm.generate(prompts, sampling_params)
print(f"took {time() - start} s, {outputs[0].num_cached_tokens} tokens from the cache")
assert outputs[0].num_cached_tokens and texts == [output.outputs[0].text for output in outputs]
