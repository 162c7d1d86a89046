from huggingface_hub import snapshot_download
from vllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

engine_args = EngineArgs(
    model="meta-llama/Llama-2-7b-hf",
    enable_lora=True,
    max_loras=1,
    max_lora_rank=8,
    max_cpu_loras=2,
    max_num_seqs=256,
)
engine = LLMEngine.from_engine_args(engine_args)
lora_path = snapshot_download(repo_id="yard1/llama-2-7b-sql-lora-test")
greedy = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=8, stop_token_ids=[300])
beams = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0, max_tokens=8)
waiting = [
    ("A robot may not injure", greedy, None),
    ("Write a SQL query", greedy, LoRARequest("sql-lora", 1, lora_path)),
    ("Write a SQL query", greedy, LoRARequest("sql-lora2", 2, lora_path)),
    ("Name the airport", beams, LoRARequest("sql-lora", 1, lora_path)),
]
request_id = 0
while waiting or engine.has_unfinished_requests():
    if waiting:
        prompt, sampling_params, lora_request = waiting.pop(0)
        engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
        request_id += 1
    request_outputs: list[RequestOutput] = engine.step()
    for request_output in request_outputs:
        if request_output.finished:
            print(request_output)

llm = LLM(model="meta-llama/Llama-2-7b-hf", enable_lora=True)
outputs = llm.generate(
    ["Write a SQL query", "Name the airport"],
    SamplingParams(temperature=0, max_tokens=8, stop=["[/assistant]"]),
    lora_request=LoRARequest("sql_adapter", 3, lora_path),
)
assert [output.lora_request.lora_name for output in outputs] == ["sql_adapter"] * 2
