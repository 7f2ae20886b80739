"""An agent on `pydantic-ai`: through chat completions or the responses API, streamed or not."""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from warehouse import INSTRUCTIONS, PROMPT, Warehouse, run

MODEL = "gpt-4o"


def agent_of(model: Any, warehouse: Warehouse) -> Any:
    """Return the agent."""
    agent = Agent(model, instructions=INSTRUCTIONS)
    agent.tool_plain(warehouse.find)
    agent.tool_plain(warehouse.fetch)
    return agent


def finished(result: Any, output: str, warehouse: Warehouse) -> str:
    """Return the answer, with what it has cost noted."""
    usage = result.usage() if callable(result.usage) else result.usage
    warehouse.used(usage.input_tokens, usage.output_tokens)
    return output


def play(model: Any, warehouse: Warehouse) -> str:
    """Run an episode."""
    result = agent_of(model, warehouse).run_sync(PROMPT)
    return finished(result, result.output, warehouse)


async def play_streamed(model: Any, warehouse: Warehouse) -> str:
    """Run an episode whose replies are streamed."""
    async with agent_of(model, warehouse).run_stream(PROMPT) as result:
        return finished(result, await result.get_output(), warehouse)


def chat(url: str, key: str, warehouse: Warehouse) -> str:
    return play(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key)), warehouse)


async def chat_stream(url: str, key: str, warehouse: Warehouse) -> str:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key))
    return await play_streamed(model, warehouse)


def responses(url: str, key: str, warehouse: Warehouse) -> str:
    return play(OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key)), warehouse)


async def responses_stream(url: str, key: str, warehouse: Warehouse) -> str:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=key))
    return await play_streamed(model, warehouse)


if __name__ == "__main__":
    run({"chat": chat, "chat_stream": chat_stream, "responses": responses, "responses_stream": responses_stream})
