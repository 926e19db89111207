"""The process of one rank of a torch.distributed.pipelining pipeline that sleeps (`clockwork.py`).

Imports nothing that needs jax. `{"do": "build", "name": key, "schedule": class, "work": ...}`
prepares a step and runs it once.
"""

import time
from functools import partial

import torch
from torch import nn
from torch_pipeline import RankWorker, connect, pipeline_step, serve


class SleepingIdentity(torch.autograd.Function):
    """The identity, whose backward pass sleeps for `seconds`."""

    @staticmethod
    def forward(ctx, x, seconds):
        """Return a view of x."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        """Return dy after the sleep."""
        time.sleep(ctx.seconds)
        return dy, None


class SleepingStage(nn.Module):
    """A product whose forward, input gradient and weight gradient sleep for given seconds."""

    def __init__(self, f, b, w):
        super().__init__()
        self.f, self.b, self.w = f, b, w
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        """`[1, 1] -> [1, 1]`."""
        time.sleep(self.f)
        return SleepingIdentity.apply(x, self.b) * SleepingIdentity.apply(self.weight, self.w)


class TorchSleepWorker(RankWorker):
    """Steps of modules that sleep."""

    def build(self, name, schedule, work):
        """Prepare a step and run it once."""
        run, _ = pipeline_step(
            schedule, self.rank, self.size, work["microbatches"], lambda y, target: y.sum(),
            lambda _, stages: SleepingStage(*(work[op] * self.size / stages for op in "FBW")),
        )  # fmt: skip
        x = torch.ones(work["microbatches"], 1)

        def step():
            run(x, x)

        self.steps[name] = step
        return self.step(name)


if __name__ == "__main__":
    serve(partial(connect, TorchSleepWorker), torch.__version__)
