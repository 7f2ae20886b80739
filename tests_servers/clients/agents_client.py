"""An agent on `openai-agents`: through the responses API, its default, or chat completions, streamed or not."""

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from warehouse import INSTRUCTIONS, PROMPT, Warehouse, run

MODEL = "gpt-4o"
set_tracing_disabled(True)  # traces go to its maker


def agent_of(model: Any, warehouse: Warehouse) -> Any:
    """Return the agent."""

    @function_tool
    def find(thing: str) -> int:
        """Say which shelf a thing lies on.

        Args:
            thing: one thing
        """
        return warehouse.find(thing)

    @function_tool
    def fetch(shelves: list[int]) -> str:
        """Fetch what lies on these shelves."""
        return warehouse.fetch(shelves)

    settings = ModelSettings(include_usage=True)  # of streamed chat completions, too
    return Agent(name="warehouse", instructions=INSTRUCTIONS, model=model, tools=[find, fetch], model_settings=settings)


async def play(model: Any, warehouse: Warehouse) -> str:
    """Run an episode."""
    result = await Runner.run(agent_of(model, warehouse), PROMPT)
    usage = result.context_wrapper.usage
    warehouse.used(usage.input_tokens, usage.output_tokens)
    return result.final_output


async def play_streamed(model: Any, warehouse: Warehouse) -> str:
    """Run an episode whose replies are streamed."""
    result = Runner.run_streamed(agent_of(model, warehouse), PROMPT)
    async for _ in result.stream_events():
        pass
    usage = result.context_wrapper.usage
    warehouse.used(usage.input_tokens, usage.output_tokens)
    return result.final_output


async def responses(url: str, key: str, warehouse: Warehouse) -> str:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        return await play(OpenAIResponsesModel(MODEL, client), warehouse)


async def responses_stream(url: str, key: str, warehouse: Warehouse) -> str:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        return await play_streamed(OpenAIResponsesModel(MODEL, client), warehouse)


async def chat(url: str, key: str, warehouse: Warehouse) -> str:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        return await play(OpenAIChatCompletionsModel(MODEL, client), warehouse)


async def chat_stream(url: str, key: str, warehouse: Warehouse) -> str:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        return await play_streamed(OpenAIChatCompletionsModel(MODEL, client), warehouse)


if __name__ == "__main__":
    run({"responses": responses, "responses_stream": responses_stream, "chat": chat, "chat_stream": chat_stream})
