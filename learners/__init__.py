"""How experience becomes weights: batches, advantages, losses, learners.

Imports `turngate.runtime` and `turngate.envs`.
"""

if __name__ == "learners":
    raise ImportError("import turngate.learners, not learners: the bare name makes a second copy of every class")

__all__: list[str] = []
