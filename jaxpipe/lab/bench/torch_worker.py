"""The process of one rank of a measurement of torch.distributed.pipelining: one thread, gloo.

Imports nothing that needs jax and runs under any Python that has torch and numpy. `{"do": "build",
"name": key, "schedule": class or null, "config": ..., "values": file}` prepares a step of jaxpipe's
decoder, which ends with AdamW, and runs it twice; the file has the initial parameters by name, and
the batch. `"build_sleeping"` prepares a step of modules that sleep. For other commands see
`serving.py`.
"""

import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from serving import StepWorker, serve  # beside this file
from torch import nn
from torch.distributed import pipelining


class TorchLayer(nn.Module):
    """A Llama layer: grouped-query attention with rotary positions, SwiGLU, RMSNorm before each."""

    def __init__(self, m):
        super().__init__()
        d, self.heads, self.groups = m["d_model"], m["n_heads"], m["n_kv_heads"]
        self.k = d // self.heads
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        self.attn_norm, self.mlp_norm = nn.RMSNorm(d, m["norm_eps"]), nn.RMSNorm(d, m["norm_eps"])
        self.wq, self.wo = linear(d, d), linear(d, d)
        self.wk, self.wv = linear(d, self.groups * self.k), linear(d, self.groups * self.k)
        self.gate, self.up, self.down = (
            linear(d, m["d_ff"]), linear(d, m["d_ff"]), linear(m["d_ff"], d)
        )  # fmt: skip
        frequency = m["rope_theta"] ** (-torch.arange(self.k // 2) / (self.k // 2))
        angle = torch.arange(m["seq_len"])[:, None] * frequency
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turn(self, x):
        """Apply rotary positions to `[B, H, L, K]`, rotate-half layout."""
        first, second = x.chunk(2, -1)
        turned = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return torch.cat(turned, -1)

    def forward(self, x):
        """`[B, L, D] -> [B, L, D]`."""
        b, length, _ = x.shape
        n = self.attn_norm(x)
        heads = lambda y, h: y.view(b, length, h, self.k).transpose(1, 2)  # noqa: E731
        q, k = heads(self.wq(n), self.heads), heads(self.wk(n), self.groups)
        v = heads(self.wv(n), self.groups)
        mixed = F.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.wo(mixed.transpose(1, 2).reshape(b, length, -1))
        n = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class TorchStage(nn.Module):
    """A stage's layers; the first stage also has the embedding, the last final norm and head."""

    def __init__(self, m, stage, stages, values):
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        each = m["n_layers"] // stages
        self.embed = nn.Embedding(m["vocab_size"], m["d_model"]) if self.first else nn.Identity()
        self.layers = nn.Sequential(*[TorchLayer(m) for _ in range(each)])
        ends = (
            nn.RMSNorm(m["d_model"], m["norm_eps"]),
            nn.Linear(m["d_model"], m["vocab_size"], bias=False),
        )
        self.head = nn.Sequential(*ends) if self.last else nn.Identity()
        with torch.no_grad():
            self.fill(values, stage * each)

    def fill(self, values, first_layer):
        """Copy the initial parameters; jaxpipe's matrices are transposed: it computes `x @ w`."""

        def put(parameter, value, matrix=False):
            parameter.copy_(torch.from_numpy(value.T.copy() if matrix else value.copy()))

        if self.first:
            put(self.embed.weight, values["embed_head/embed"])
        if self.last:
            put(self.head[0].weight, values["embed_head/final_norm/scale"])
            put(self.head[1].weight, values["embed_head/head"], matrix=True)
        for number, layer in enumerate(self.layers, first_layer):
            of = lambda name, number=number: values[f"layers/{number}/{name}"]  # noqa: E731
            put(layer.attn_norm.weight, of("attn_norm/scale"))
            put(layer.mlp_norm.weight, of("mlp_norm/scale"))
            for name in ("wq", "wk", "wv", "wo"):
                put(getattr(layer, name).weight, of(f"attn/{name}"), matrix=True)
            for name in ("gate", "up", "down"):
                put(getattr(layer, name).weight, of(f"mlp/w_{name}"), matrix=True)

    def forward(self, x):
        """Map tokens (first stage) or activations to activations or logits (last stage)."""
        return self.head(self.layers(self.embed(x)))


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


class TorchWorker(StepWorker):
    """One rank's prepared steps, by name."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size

    def build_sleeping(self, name, schedule, work):
        """Prepare a step of modules that sleep and run it once."""
        run, _ = pipeline_step(
            schedule, self.rank, self.size, work["microbatches"], lambda y, target: y.sum(),
            lambda _, stages: SleepingStage(*(work[op] * self.size / stages for op in "FBW")),
        )  # fmt: skip
        x = torch.ones(work["microbatches"], 1)

        def step():
            run(x, x)

        self.steps[name] = step
        return self.step(name)

    def build(self, name, schedule, config, values):
        """Prepare a step and run it twice; return both losses and the second's begin and end."""
        self.model = config["model"] | {"seq_len": config["train"]["seq_len"]}
        self.optimizer = config["optimizer"]
        with np.load(values) as file:
            self.values = dict(file)
        tokens = [torch.from_numpy(self.values[name]).long() for name in ("inputs", "targets")]
        inputs, targets = (t.flatten(0, 1).contiguous() for t in tokens)
        prepare = self.single if schedule is None else self.pipelined
        self.steps[name] = prepare(inputs, targets, len(tokens[0]), schedule)
        return self.step_twice(name)

    def adamw(self, modules):
        """Return PyTorch's fused AdamW, without weight decay of norm gains."""
        o = self.optimizer
        parameters = [p for module in modules for p in module.parameters()]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": o["weight_decay"]},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (o["beta1"], o["beta2"])
        return torch.optim.AdamW(groups, o["lr"], betas, o["eps"], fused=True)

    def loss_of(self, count):
        """Return a loss function: summed cross-entropy over `count`, the targets of a step."""

        def loss(logits, targets):
            flat = logits.flatten(0, 1), targets.flatten()
            return F.cross_entropy(*flat, reduction="sum") / count

        return loss

    def single(self, inputs, targets, microbatches, _):
        """Return a step that runs one microbatch after another in one process."""
        model, loss_of = TorchStage(self.model, 0, 1, self.values), self.loss_of(targets.numel())
        optimizer = self.adamw([model])
        pairs = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches)))

        def step():
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for x, y in pairs:
                loss = loss_of(model(x), y)
                loss.backward()
                total += loss.item()
            optimizer.step()
            return total

        return step

    def pipelined(self, inputs, targets, microbatches, schedule):
        """Return a step of this rank's one or two stages under a schedule of PyTorch."""
        run, modules = pipeline_step(
            schedule, self.rank, self.size, microbatches, self.loss_of(targets.numel()),
            lambda stage, stages: TorchStage(self.model, stage, stages, self.values),
        )  # fmt: skip
        optimizer = self.adamw(modules)

        def step():
            optimizer.zero_grad(set_to_none=True)
            losses = run(inputs, targets)
            optimizer.step()
            return float(sum(losses))

        return step


def pipeline_step(schedule, rank, size, microbatches, loss_fn, module):
    """Return `(inputs, targets) -> losses` under a schedule of PyTorch, and the rank's modules.

    `module` is `(stage, stages) -> nn.Module`. Losses are empty but on the rank of the last stage.
    """
    stages, own = size, [rank]
    if schedule not in ("ScheduleGPipe", "Schedule1F1B"):
        v_shaped = schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        stages, own = 2 * size, [rank, 2 * size - 1 - rank if v_shaped else rank + size]
    modules = [module(stage, stages) for stage in own]
    pieces = [
        pipelining.PipelineStage(module, stage, stages, torch.device("cpu"))
        for module, stage in zip(modules, own)
    ]
    runner = getattr(pipelining, schedule)(
        pieces if len(pieces) > 1 else pieces[0], microbatches, loss_fn=loss_fn, scale_grads=False
    )

    def run(inputs, targets):
        losses = []
        target = targets if stages - 1 in own else None
        runner.step(*((inputs,) if 0 in own else ()), target=target, losses=losses)
        return losses

    return run, modules


def connect(rank, size, port):
    """Return a worker of one thread, connected to the other processes."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return TorchWorker(rank, size)


if __name__ == "__main__":
    serve(connect, torch.__version__)
