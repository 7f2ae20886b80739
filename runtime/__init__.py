"""How agents are run and recorded: endpoints, rollouts, scheduling, the buffer. Imports `turngate.envs`."""

if __name__ == "runtime":
    raise ImportError("import turngate.runtime, not runtime: the bare name makes a second copy of every class")

__all__: list[str] = []
