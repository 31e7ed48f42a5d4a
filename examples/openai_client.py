"""The openai package against a running `make serve`: synchronous, asynchronous, streaming.

HEADRACE_URL and HEADRACE_KEY name another server and a key for it.
"""

from __future__ import annotations

import asyncio
import os
import sys

from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

URL = os.environ.get("HEADRACE_URL", "http://127.0.0.1:8000") + "/v1"
KEY = os.environ.get("HEADRACE_KEY", "none")
MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"


def ask(question: str) -> list[ChatCompletionUserMessageParam]:
    return [{"role": "user", "content": question}]


def synchronous(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ask("What is the capital of France?"),
        max_tokens=40,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    print(answer.usage)


def streaming(client: OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=ask("Name three rivers."), max_tokens=40, stream=True
    ) as stream:
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


async def many_at_once(client: AsyncOpenAI, count: int = 8) -> None:
    """All of them run in the same steps of the engine."""

    async def one(number: int) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt=f"{number} + {number} =", max_tokens=8, temperature=0
        )
        return answer.choices[0].text

    for text in await asyncio.gather(*(one(number) for number in range(count))):
        print(repr(text))


async def main() -> None:
    with OpenAI(base_url=URL, api_key=KEY) as client:
        synchronous(client)
        streaming(client)
    async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        await many_at_once(client)


if __name__ == "__main__":
    asyncio.run(main())
