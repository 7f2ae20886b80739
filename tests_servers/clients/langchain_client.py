"""An agent on LangChain's `ChatOpenAI`: in a loop of its own, streamed or not, and as a node of LangGraph's agent."""

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from warehouse import INSTRUCTIONS, PROMPT, Warehouse, run

MODEL = "gpt-4o"


def tools_of(warehouse: Warehouse) -> list[Any]:
    """Return the warehouse's tools as LangChain has them."""

    @tool
    def find(thing: str) -> int:
        """Say which shelf a thing lies on."""
        return warehouse.find(thing)

    @tool
    def fetch(shelves: list[int]) -> str:
        """Fetch what lies on these shelves."""
        return warehouse.fetch(shelves)

    return [find, fetch]


def opening() -> list[Any]:
    """Return the messages that an episode begins with."""
    return [SystemMessage(INSTRUCTIONS), HumanMessage(PROMPT)]


def count(warehouse: Warehouse, message: Any) -> None:
    """Note what a reply has cost."""
    usage = message.usage_metadata
    warehouse.used(usage["input_tokens"], usage["output_tokens"])


def play(model: Any, warehouse: Warehouse, *, is_streamed: bool = False) -> str:
    """Run an episode in a loop."""
    tools = {one.name: one for one in tools_of(warehouse)}
    bound = model.bind_tools(list(tools.values()))
    messages = opening()
    while True:
        if is_streamed:
            reply = None
            for chunk in bound.stream(messages):
                reply = chunk if reply is None else reply + chunk
        else:
            reply = bound.invoke(messages)
        count(warehouse, reply)
        messages.append(reply)
        if not reply.tool_calls:
            return reply.text
        messages += [tools[asked["name"]].invoke(asked) for asked in reply.tool_calls]


def chat(url: str, key: str, warehouse: Warehouse) -> str:
    return play(ChatOpenAI(model=MODEL, base_url=url, api_key=key), warehouse)


def chat_stream(url: str, key: str, warehouse: Warehouse) -> str:
    model = ChatOpenAI(model=MODEL, base_url=url, api_key=key, stream_usage=True)
    return play(model, warehouse, is_streamed=True)


def responses(url: str, key: str, warehouse: Warehouse) -> str:
    return play(ChatOpenAI(model=MODEL, base_url=url, api_key=key, use_responses_api=True), warehouse)


async def graph(url: str, key: str, warehouse: Warehouse) -> str:
    """The same as a graph of two nodes."""
    tools = tools_of(warehouse)
    model = ChatOpenAI(model=MODEL, base_url=url, api_key=key).bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SystemMessage(INSTRUCTIONS), *state["messages"]])]}

    def is_done(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    flow = StateGraph(MessagesState)
    flow.add_node("ask", ask)
    flow.add_node("tools", ToolNode(tools))
    flow.add_edge(START, "ask")
    flow.add_conditional_edges("ask", is_done, ["tools", END])
    flow.add_edge("tools", "ask")
    final = await flow.compile().ainvoke({"messages": [HumanMessage(PROMPT)]})
    for message in final["messages"]:
        if isinstance(message, AIMessage):
            count(warehouse, message)
    return final["messages"][-1].text


if __name__ == "__main__":
    run({"chat": chat, "chat_stream": chat_stream, "responses": responses, "graph": graph})
