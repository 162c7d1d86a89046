import torch
from vllm import LLM, SamplingParams

for options in (
    {"model": "TheBloke/Llama-2-7b-Chat-AWQ", "quantization": "AWQ"},
    {"model": "facebook/opt-125m", "quantization": "fp8"},
    {"model": "facebook/opt-125m", "kv_cache_dtype": "fp8"},
    {
        "model": "unsloth/tinyllama-bnb-4bit",
        "dtype": torch.bfloat16,
        "trust_remote_code": True,
        "quantization": "bitsandbytes",
        "load_format": "bitsandbytes",
    },
    {
        "model": "meta-llama/Llama-2-7b-chat-hf",
        "kv_cache_dtype": "fp8",
        "quantization_param_path": "kv_cache_scales.json",
    },
    {"model": "tinyllama.Q4_0.gguf", "tokenizer": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"},
    {"model": "nm-testing/Meta-Llama-3-8B-Instruct-W8A8", "max_model_len": 4096, "dtype": "half"},
):
    llm = LLM(**options)
    print(llm.generate("Hello, my name is", SamplingParams(temperature=1.3, top_p=0.8))[0].outputs[0].text)
