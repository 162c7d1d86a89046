import gc

from vllm import LLM, SamplingParams

prompts = ["The future of AI is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
for options in (
    {
        "model": "facebook/opt-6.7b",
        "tensor_parallel_size": 1,
        "speculative_model": "facebook/opt-125m",
        "num_speculative_tokens": 5,
        "use_v2_block_manager": True,
    },
    {
        "model": "facebook/opt-6.7b",
        "speculative_model": "[ngram]",
        "num_speculative_tokens": 5,
        "ngram_prompt_lookup_max": 4,
        "use_v2_block_manager": True,
    },
    {
        "model": "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "tensor_parallel_size": 4,
        "speculative_model": "ibm-fms/llama3-70b-accelerator",
        "speculative_draft_tensor_parallel_size": 1,
        "use_v2_block_manager": True,
    },
):
    llm = LLM(**options)
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    del llm
    gc.collect()
