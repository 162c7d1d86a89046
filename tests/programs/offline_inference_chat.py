from vllm import LLM, SamplingParams

llm = LLM(model="meta-llama/Meta-Llama-3-8B-Instruct")
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write about higher education."},
]
outputs = llm.chat(conversation, sampling_params=SamplingParams(temperature=0.5), use_tqdm=False)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
response = llm.chat(
    messages=conversation,
    sampling_params=SamplingParams(temperature=0.6, max_tokens=20),
    chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    add_generation_prompt=True,
)
print(response[0].outputs[0].text)
