"""An agent on `curl`, for those who have no SDK: in one piece, or as server-sent events. Needs no package at all."""

import json
import subprocess
from typing import Any

from warehouse import INSTRUCTIONS, PROMPT, Warehouse, run

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: schema}, "required": [argument]},
        },
    }
    for name, description, argument, schema in (
        ("find", "Say which shelf a thing lies on.", "thing", {"type": "string"}),
        ("fetch", "Fetch what lies on these shelves.", "shelves", {"type": "array", "items": {"type": "integer"}}),
    )
]


def post(url: str, key: str, body: dict[str, Any], turn: int) -> str:
    """Return what the server answers. A name for the request lets curl's own retries be told from new ones."""
    command = ["curl", "--silent", "--show-error", "--fail", "--no-buffer", "--max-time", "60"]
    command += ["--retry", "3", "--retry-all-errors", "--retry-delay", "1"]
    command += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
    command += ["-H", f"Idempotency-Key: turn-{turn}", "--data-binary", "@-", f"{url}/chat/completions"]
    done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"curl: {done.stderr}")
    return done.stdout


def whole(told: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return message and usage of a reply."""
    reply = json.loads(told)
    return reply["choices"][0]["message"], reply["usage"]


def added_up(told: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return message and usage of a streamed reply."""
    text, calls, usage = "", [], {}
    for line in told.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    calls[part["index"]]["function"][name] += part["function"].get(name) or ""
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}, usage


def play(url: str, key: str, warehouse: Warehouse, *, is_streamed: bool) -> str:
    """Run an episode."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": PROMPT},
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    for turn in range(8):
        told = post(url, key, {"model": "any", "messages": messages, "tools": TOOLS, **options}, turn)
        message, usage = added_up(told) if is_streamed else whole(told)
        warehouse.used(usage["prompt_tokens"], usage["completion_tokens"])
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            tool = getattr(warehouse, call["function"]["name"])
            content = str(tool(**json.loads(call["function"]["arguments"])))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    raise RuntimeError("the agent must finish: it called tools for ever")


def chat(url: str, key: str, warehouse: Warehouse) -> str:
    return play(url, key, warehouse, is_streamed=False)


def chat_stream(url: str, key: str, warehouse: Warehouse) -> str:
    return play(url, key, warehouse, is_streamed=True)


if __name__ == "__main__":
    run({"chat": chat, "chat_stream": chat_stream})
