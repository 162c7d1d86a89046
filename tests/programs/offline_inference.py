from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-125m")
for output in llm.generate(prompts, sampling_params):
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")

# One set of parameters for each prompt, one prompt alone, and options of memory.
llm = LLM(
    model="meta-llama/Llama-2-7b-chat-hf",
    tensor_parallel_size=1,
    gpu_memory_utilization=0.85,
    swap_space=4,
    enforce_eager=False,
)
each = [SamplingParams(temperature=0.1 * i, max_tokens=5 + i) for i in range(len(prompts))]
assert [len(output.outputs[0].token_ids) <= 5 + i for i, output in enumerate(llm.generate(prompts, each))]
with LLM(model="meta-llama/Llama-3.2-1B-Instruct") as llm:
    print(llm.generate("Hello, my name is")[0].outputs[0].text)
