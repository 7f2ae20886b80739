"""An agent on the official `openai` package: both of its APIs, synchronous, asynchronous and streamed."""

import json
from typing import Any

from openai import AsyncOpenAI, OpenAI
from warehouse import INSTRUCTIONS, PROMPT, Warehouse, run


def function(name: str, description: str, argument: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a tool. Its arguments are strict: the package parses those of streamed calls only then."""
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    parameters["additionalProperties"] = False
    return {"name": name, "description": description, "parameters": parameters, "strict": True}


FUNCTIONS: list[Any] = [
    function("find", "Say which shelf a thing lies on.", "thing", {"type": "string"}),
    function("fetch", "Fetch what lies on these shelves.", "shelves", {"type": "array", "items": {"type": "integer"}}),
]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": one} for one in FUNCTIONS]
RESPONSE_TOOLS: list[Any] = [{"type": "function", **one} for one in FUNCTIONS]
MODEL = "gpt-4o"


def call(warehouse: Warehouse, name: str, arguments: str) -> str:
    """Call a tool of the warehouse."""
    return str(getattr(warehouse, name)(**json.loads(arguments)))


def opening() -> list[Any]:
    """Return the messages that an episode begins with."""
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": PROMPT}]


def go_on(warehouse: Warehouse, messages: list[Any], completion: Any) -> bool:
    """Add the reply and what the tools answer; False when no tool was called."""
    message = completion.choices[0].message
    warehouse.used(completion.usage.prompt_tokens, completion.usage.completion_tokens)
    messages.append(message)
    for asked in message.tool_calls or ():
        content = call(warehouse, asked.function.name, asked.function.arguments)
        messages.append({"role": "tool", "tool_call_id": asked.id, "content": content})
    return bool(message.tool_calls)


def sync(url: str, key: str, warehouse: Warehouse) -> str:
    """Chat completions with the synchronous client."""
    messages = opening()
    with OpenAI(base_url=url, api_key=key) as client:
        while go_on(
            warehouse, messages, client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        ):
            pass
    return messages[-1].content


async def asynchronous(url: str, key: str, warehouse: Warehouse) -> str:
    """Chat completions with the asynchronous client."""
    messages = opening()
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        while go_on(
            warehouse, messages, await client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        ):
            pass
    return messages[-1].content


async def stream(url: str, key: str, warehouse: Warehouse) -> str:
    """Chat completions, streamed, added up by the package itself."""
    messages = opening()
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        while True:
            asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}
            async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                completion = await events.get_final_completion()
            if not go_on(warehouse, messages, completion):
                return messages[-1].content


def sync_stream(url: str, key: str, warehouse: Warehouse) -> str:
    """Chat completions, streamed, chunks read one by one."""
    messages = opening()
    with OpenAI(base_url=url, api_key=key) as client:
        while True:
            text, calls = "", {}
            for chunk in client.chat.completions.create(
                model=MODEL, messages=messages, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
            ):
                if chunk.usage:
                    warehouse.used(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    for part in choice.delta.tool_calls or ():
                        entry = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                        entry["id"] += part.id or ""
                        entry["name"] += part.function.name or ""
                        entry["arguments"] += part.function.arguments or ""
            if not calls:
                return text
            functions = [{"name": entry["name"], "arguments": entry["arguments"]} for entry in calls.values()]
            said = [
                {"id": entry["id"], "type": "function", "function": function}
                for entry, function in zip(calls.values(), functions, strict=True)
            ]
            messages.append({"role": "assistant", "content": text or None, "tool_calls": said})
            for entry in calls.values():
                content = call(warehouse, entry["name"], entry["arguments"])
                messages.append({"role": "tool", "tool_call_id": entry["id"], "content": content})


def answers(warehouse: Warehouse, response: Any) -> list[Any]:
    """Return what the tools answer to a response."""
    warehouse.used(response.usage.input_tokens, response.usage.output_tokens)
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": call(warehouse, item.name, item.arguments),
        }
        for item in response.output
        if item.type == "function_call"
    ]


def responses(url: str, key: str, warehouse: Warehouse) -> str:
    """The responses API, the whole history sent each time."""
    history: list[Any] = [{"role": "user", "content": PROMPT}]
    with OpenAI(base_url=url, api_key=key) as client:
        while True:
            response = client.responses.create(
                model=MODEL, input=history, tools=RESPONSE_TOOLS, instructions=INSTRUCTIONS, store=False
            )
            results = answers(warehouse, response)
            if not results:
                return response.output_text
            history += [*response.output, *results]


async def responses_stream(url: str, key: str, warehouse: Warehouse) -> str:
    """The responses API, streamed, earlier turns by their id."""
    asked: dict[str, Any] = {"input": PROMPT}
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        while True:
            async with client.responses.stream(
                model=MODEL, tools=RESPONSE_TOOLS, instructions=INSTRUCTIONS, **asked
            ) as events:
                response = await events.get_final_response()
            results = answers(warehouse, response)
            if not results:
                return response.output_text
            asked = {"input": results, "previous_response_id": response.id}


if __name__ == "__main__":
    run(
        {
            "sync": sync,
            "async": asynchronous,
            "stream": stream,
            "sync_stream": sync_stream,
            "responses": responses,
            "responses_stream": responses_stream,
        }
    )
