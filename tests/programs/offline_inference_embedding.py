from vllm import LLM

prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
model = LLM(model="intfloat/e5-mistral-7b-instruct", enforce_eager=True)
outputs = model.encode(prompts)
for output in outputs:
    assert all(isinstance(number, float) for number in output.outputs.embedding)
    print(output.request_id, len(output.outputs.embedding))
(embedding,) = model.embed("Hello, my name is")
(score,) = model.score("Hello, my name is", "The capital of France is")
print(len(embedding.outputs.embedding), score.outputs.score)
