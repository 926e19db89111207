"""Pipeline parallelism: model contract, mesh, schedules, split of a layer, executor.

Imports jax, numpy and itself alone.
"""
