"""What a server says about itself: software, model list, weight routes, caches. Nothing here changes anything."""

import re

from turngate.runtime.capabilities import Finding
from turngate.runtime.probing.asking import Answer, as_number, as_text, at
from turngate.runtime.probing.judging import failed, no, unknown, yes

__all__ = ["WEIGHT_ROUTES", "judge_models", "judge_weights", "max_context", "model_ids", "routes_of", "server_of"]

WEIGHT_ROUTES = {
    "/admin/weights": "EnginePublisher",
    "/collective_rpc": "VLLMPublisher",
    "/v1/load_lora_adapter": "VLLMPublisher, adapters",
    "/update_weights_from_disk": "SGLangPublisher",
}
"""Routes below the server's root, and what publishes to each."""

_OWNERS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "turngate": "turngate engine"}
_CONTEXT_FIELDS = (("max_model_len",), ("meta", "n_ctx"), ("context_length",), ("max_context_length",), ("n_ctx",))
_PREFIX_FLAG = re.compile(r'enable_prefix_caching="(True|False)"')


def model_ids(models: Answer) -> list[str]:
    """Return the ids that GET /models lists."""
    data = models.at("data")
    return [name for card in data if (name := as_text(at(card, "id")))] if isinstance(data, list) else []


def judge_models(models: Answer, model: str) -> Finding:
    """Judge whether the model is on the list."""
    if not models.ok:
        return failed(models)
    ids = model_ids(models)
    listed = ", ".join(ids[:4]) + (", ..." if len(ids) > 4 else "")
    return yes(f"listed: {listed}") if model in ids else no(f"listed: {listed or 'nothing'}")


def max_context(models: Answer, model: str) -> int | None:
    """Return the context length that the model's card states, whichever way servers spell it."""
    data = models.at("data")
    for card in data if isinstance(data, list) else []:
        if at(card, "id") == model:
            for path in _CONTEXT_FIELDS:
                if (found := as_number(at(card, *path))) is not None and 0 < found < 2**31:
                    return int(found)
    return None


def server_of(models: Answer, version: Answer, openapi: Answer) -> str:
    """Return which software answers, with its version where it says."""
    owner = as_text(models.at("data", 0, "owned_by")).lower()
    title = as_text(openapi.at("info", "title")).lower()
    number = as_text(version.at("version"))
    if owner in _OWNERS:
        return f"{_OWNERS[owner]} {number}".rstrip()
    if "llama.cpp python" in title:
        return f"llama-cpp-python {as_text(openapi.at('info', 'version'))}".rstrip()
    for sign, name in _OWNERS.items():
        if sign in title:
            return f"{name} {number}".rstrip()
    if "/load_model" in routes_of(openapi) and "/v1/responses" in routes_of(openapi):
        return "transformers serve"
    for header, name in (("openai-version", "OpenAI"), ("x-vllm-version", "vLLM")):
        if header in {key.lower() for key in models.headers}:
            return name
    return as_text(openapi.at("info", "title"))[:40] if title not in ("", "fastapi") else "unknown"


def routes_of(openapi: Answer) -> set[str]:
    """Return the paths of a server's schema; empty when it has none to show."""
    paths = openapi.at("paths")
    return set(paths) if isinstance(paths, dict) else set()


def judge_weights(found: dict[str, Answer | None], told: set[str]) -> tuple[Finding, tuple[str, ...]]:
    """Judge the weight routes from the schema, or from GET requests that a route for POST answers with 405."""
    routes = [r for r in WEIGHT_ROUTES if r in told or ((answer := found.get(r)) and answer.status == 405)]
    if routes:
        return yes(", ".join(f"{route} ({WEIGHT_ROUTES[route]})" for route in routes)), tuple(routes)
    silent = [answer for answer in found.values() if answer is not None and answer.status not in (404, 405)]
    return (unknown(silent[0].problem) if silent and not told else no("no known route")), ()


def judge_prefix_cache(replies: list[Answer], metrics: Answer) -> Finding:
    """Judge by the usage of repeated prompts, or by what the metrics say of the cache."""
    cached = [
        n for r in replies if (n := as_number(r.at("usage", "prompt_tokens_details", "cached_tokens"))) is not None
    ]
    if cached and max(cached) > 0:
        return yes(f"usage counted {max(cached):g} cached tokens")
    if (flag := _PREFIX_FLAG.search(metrics.text)) is not None:
        return yes("metrics: enabled") if flag.group(1) == "True" else no("metrics: disabled")
    if cached:
        return unknown("usage counted none, but the probe's prompts are short")
    return unknown("the server does not say")
