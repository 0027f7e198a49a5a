"""Ask a running server through the OpenAI client: a completion, a chat, and a stream.

Start a server first, for example with `make serve`, and then:

    python examples/openai_client.py --url http://127.0.0.1:23333/v1
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:23333/v1", help="the server's /v1 address")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate per answer (default 32)")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key="none")  # the server checks no key unless it was started with one
    model = client.models.list().data[0].id
    prompt = "class Server:\n    def __init__(self, host, port):\n"

    completion = client.completions.create(model=model, prompt=prompt, max_tokens=args.tokens, temperature=0)
    print("--- completion\n" + prompt + completion.choices[0].text)

    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "def main():"}], max_tokens=args.tokens, temperature=0
    )
    print(f"--- chat\n{chat.choices[0].message.content}")

    print("--- stream\n" + prompt, end="")
    stream = client.completions.create(model=model, prompt=prompt, max_tokens=args.tokens, temperature=0, stream=True)
    for part in stream:
        if part.choices:
            print(part.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
