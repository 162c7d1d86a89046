import sys

from openai import OpenAI

openai_api_key = "EMPTY"
openai_api_base = f"{sys.argv[1]}/v1"
client = OpenAI(api_key=openai_api_key, base_url=openai_api_base)
models = client.models.list()
model = models.data[0].id

completion = client.completions.create(
    model=model, prompt="A robot may not injure a human being", echo=False, n=2, stream=False, logprobs=3
)
print("Completion results:", completion)
for chunk in client.completions.create(model=model, prompt="The future of AI is", n=1, stream=True):
    print(chunk)
chat_completion = client.chat.completions.create(
    messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who won the world series in 2020?"},
        {"role": "assistant", "content": "The Los Angeles Dodgers won the World Series in 2020."},
        {"role": "user", "content": "Where was it played?"},
    ],
    model=model,
    max_tokens=8,
)
print("Chat completion results:", chat_completion)
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me a joke."}],
    temperature=0.8,
    max_tokens=8,
    stream=True,
    extra_body={"repetition_penalty": 1, "stop_token_ids": []},
)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
