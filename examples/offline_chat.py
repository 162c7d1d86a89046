"""Conversations, in one program: one, several at a time, and one that goes on.

python examples/offline_chat.py --model demo
"""

from __future__ import annotations

import argparse

from pagewire import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo", help="a model with a chat template")
parser.add_argument("--chat-template", help="a file with another one, such as those of examples/templates")
arguments = parser.parse_args()

params = SamplingParams(temperature=0.0, max_tokens=40)
questions = ["What is the with statement?", "What is a list?"]
conversations = [[{"role": "user", "content": question}] for question in questions]
with LLM(model=arguments.model) as llm:
    answers = llm.chat(conversations, params, chat_template=arguments.chat_template)
    for question, output in zip(questions, answers, strict=True):
        print(f"{question} -> {output.outputs[0].text!r}")
    longer = [
        *conversations[0],
        {"role": "assistant", "content": answers[0].outputs[0].text},
        {"role": "user", "content": "And the for statement?"},
    ]
    (output,) = llm.chat(longer, params, chat_template=arguments.chat_template)
    print(f"... And the for statement? -> {output.outputs[0].text!r}")
