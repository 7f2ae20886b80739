"""How weights reach servers: the embedded engine, vLLM, SGLang, and a folder for anything else."""

from turngate.runtime.publishers.checked import CheckedPublisher, ServerControl
from turngate.runtime.publishers.engine import EnginePublisher
from turngate.runtime.publishers.folder import FolderPublisher
from turngate.runtime.publishers.sglang import SGLangPublisher
from turngate.runtime.publishers.vllm import VLLMPublisher

__all__ = [
    "CheckedPublisher",
    "EnginePublisher",
    "FolderPublisher",
    "SGLangPublisher",
    "ServerControl",
    "VLLMPublisher",
]
