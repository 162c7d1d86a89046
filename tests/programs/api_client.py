import argparse
import itertools
import json

import requests


def post_http_request(prompt: str, api_url: str, n: int, stream: bool) -> requests.Response:
    payload = {
        "prompt": prompt,
        "n": n,
        "use_beam_search": True,
        "temperature": 0.0,
        "max_tokens": 16,
        "stream": stream,
    }
    headers = {"User-Agent": "Test Client"}
    return requests.post(api_url, headers=headers, json=payload, stream=stream)


parser = argparse.ArgumentParser()
parser.add_argument("--host", type=str, default="localhost")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--n", type=int, default=4)
parser.add_argument("--prompt", type=str, default="San Francisco is a")
args = parser.parse_args()
api_url = f"http://{args.host}:{args.port}/generate"
whole = json.loads(post_http_request(args.prompt, api_url, args.n, stream=False).content)["text"]
assert len(whole) == args.n and all(text.startswith(args.prompt) for text in whole)
response = post_http_request(args.prompt, api_url, args.n, stream=True)
for chunk in response.iter_lines(chunk_size=8192, decode_unicode=False, delimiter=b"\0"):
    if chunk:
        texts = json.loads(chunk.decode("utf-8"))["text"]
assert texts == whole

# The web page of the demonstration asks for one text, drawn token by token.
payload = {"prompt": args.prompt, "stream": True, "max_tokens": 12, "temperature": 0.0}
response = requests.post(api_url, json=payload, stream=True)
chunks = [chunk for chunk in response.iter_lines(delimiter=b"\0") if chunk]
grown = [json.loads(chunk.decode("utf-8"))["text"][0] for chunk in chunks]
assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(grown))
assert grown[-1] == json.loads(requests.post(api_url, json=payload | {"stream": False}).content)["text"][0]
