"""What an agent acts in: tasks, environments and tools. Imports no other part of Turngate."""

if __name__ == "envs":
    raise ImportError("import turngate.envs, not envs: the bare name makes a second copy of every class")

__all__: list[str] = []
