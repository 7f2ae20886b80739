"""Publishing to a vLLM server: full weights reloaded in place, or a LoRA adapter per version."""

from pathlib import Path
from typing import Literal, TypeAlias, get_args

from turngate.runtime.errors import ConfigError
from turngate.runtime.publishers.admin import Admin
from turngate.runtime.publishers.checked import CheckedPublisher
from turngate.runtime.publishers.folders import VersionFolders, is_tied
from turngate.runtime.publishers.vllm_adapters import VLLMAdapters
from turngate.runtime.publishers.vllm_reload import VLLMReload
from turngate.runtime.weights import InFlight, check_in_flight

__all__ = ["VLLMMode", "VLLMPublisher"]

VLLMMode: TypeAlias = Literal["reload", "lora"]


class VLLMPublisher(CheckedPublisher):
    """Publishes to a vLLM server (0.32 and those like it) through its own control routes.

    `reload` replaces the weights: start the server with `VLLM_SERVER_DEV_MODE=1`. Generation stands still while they
    load; what it had computed with the old ones is computed anew, so that no token comes from a mixture.
    `lora` loads an adapter beside the older ones, under a name of its own: start it with `--enable-lora --max-loras 2
    --max-cpu-loras 4 --max-lora-rank R` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`. Every request is answered by the
    one version that it names; `model` is the newest one's name, and a run moves its endpoint to it.
    Either way with `--logprobs-mode processed_logprobs`. Server and publisher must share a file system.
    """

    def __init__(
        self,
        url: str,
        *,
        base_model: Path | str | None = None,
        mode: VLLMMode = "reload",
        in_flight: InFlight = "continues",
        model: str | None = None,
        api_key: str | None = None,
        folder: Path | str | None = None,
        keep_adapters: int = 2,
        timeout_s: float = 120.0,
        attempts: int = 4,
        retry_delay_s: float = 0.5,
        canary_tolerance: float | Literal["auto"] = "auto",
    ) -> None:
        """Prepare to publish to the server at `url`.

        Args: base_model: the folder that the server was started with, for `reload`: its configuration and tokenizer go
            with every version, and its own weights are what a first publication goes back to.
            in_flight: what becomes of requests under way when weights are reloaded. `continues`: they are frozen, and
            go on with the new weights; `pauses`: they finish first; `restarts`: they are aborted. With adapters there
            is only `continues`.
            model: the served model's name; None asks the server. folder: where the versions are laid out, on the
            server's file system; None: `served` beside the weights. keep_adapters: older adapters that stay loaded, for
            requests that still name them.
            The other settings are explained at CheckedPublisher.
        Raises: ConfigError: a setting cannot work, or `base_model` is no model folder.
        """
        if mode not in get_args(VLLMMode):
            raise ConfigError(f"mode must be 'reload' or 'lora': got {mode!r}")
        admin = Admin(url, api_key=api_key)
        folders = VersionFolders(Path(folder).absolute() if folder is not None else None)
        control: VLLMReload | VLLMAdapters
        if mode == "reload":
            if base_model is None:
                raise ConfigError("mode 'reload' needs base_model: pass the folder that the server was started with")
            check_in_flight(in_flight, ("continues", "pauses", "restarts"))
            base = Path(base_model).absolute()
            tied = is_tied(base)
            control = VLLMReload(admin, base, folders, in_flight=in_flight, model=model, is_tied=tied)
        else:
            check_in_flight(in_flight, ("continues",))
            tied = False  # adapters do not touch the head, tied or not
            control = VLLMAdapters(admin, folders, keep=keep_adapters, base=model)
        super().__init__(
            control,
            timeout_s=timeout_s,
            attempts=attempts,
            retry_delay_s=retry_delay_s,
            canary_tolerance=canary_tolerance,
            is_tied=tied,
        )
