from vllm import LLM, SamplingParams
from vllm.entrypoints import llm as module
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams

assert LLM is module.LLM and PoolingParams and PromptAdapterRequest
llm = LLM(model="some-model", tokenizer_mode="auto", seed=0, max_seq_len_to_capture=8192)
schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
result = llm.generate(
    "Data:", SamplingParams(temperature=0.0, structured_outputs={"json": schema}, max_tokens=40)
)
print(result[0].outputs[0].text)
guided = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
assert llm.generate("Well?", guided)[0].outputs[0].text in ("yes", "no")
outputs = llm.generate([TextPrompt(prompt="Hello"), TokensPrompt(prompt_token_ids=[5, 6])], use_tqdm=False)
assert isinstance(outputs[0], RequestOutput) and isinstance(outputs[0].outputs[0], CompletionOutput)
(found,) = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=2, max_tokens=4))
print(found.sequences[0].text, found.sequences[0].cum_logprob)
tokenizer = llm.get_tokenizer()
assert tokenizer.decode(tokenizer("Hello")["input_ids"]) == "Hello"
chat = [{"role": "user", "content": "Hello"}]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
assert "Hello" in text and tokenizer.apply_chat_template(chat, add_generation_prompt=True)
print(llm.get_default_sampling_params(), llm.model_config.max_model_len, len(llm.get_metrics()))
prompts = llm.preprocess_chat(chat)
assert prompts[0]["prompt"] == text
print(llm.generate(prompts, SamplingParams(max_tokens=2), priority=[0])[0].outputs[0].token_ids)
assert llm.collective_rpc("ping") == ["pong"]
assert isinstance(llm.reset_prefix_cache(reset_running_requests=True), bool)
llm.reset_mm_cache()
try:
    SamplingParams(temperature=-0.5)
except ValueError as error:
    print(f"Parameter validation failed: {error}")
