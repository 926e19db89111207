"""The same decoder under torch.distributed.pipelining: one rank, one thread, gloo.

Imports nothing of jaxpipe and runs under any Python that has torch. Reads commands as JSON lines
and answers in kind: `{"do": "build", "name": key, "microbatches": M, "schedule": class or null}`
prepares a step and runs it twice, `"step"` runs it. A step is forward and backward of all
microbatches; there is no optimizer in it.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining


class Layer(nn.Module):
    """Llama-style: grouped-query attention with rotary positions, SwiGLU, RMSNorm before each."""

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
        """Rotary positions on `[B, H, L, K]`, rotate-half layout."""
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


class Stage(nn.Module):
    """Some of the layers, with the embedding before the first and the head after the last."""

    def __init__(self, m, stage, stages):
        super().__init__()
        torch.manual_seed(stage)
        first, last = stage == 0, stage == stages - 1
        self.embed = nn.Embedding(m["vocab_size"], m["d_model"]) if first else nn.Identity()
        self.layers = nn.Sequential(*[Layer(m) for _ in range(m["n_layers"] // stages)])
        ends = (
            nn.RMSNorm(m["d_model"], m["norm_eps"]),
            nn.Linear(m["d_model"], m["vocab_size"], bias=False),
        )
        self.head = nn.Sequential(*ends) if last else nn.Identity()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        """Tokens or activations to activations or logits."""
        return self.head(self.layers(self.embed(x)))


class Worker:
    """One rank's prepared steps, by name."""

    def __init__(self, how):
        self.rank, self.size = how["rank"], how["size"]
        self.sizes = how["workload"]["model"] | {"seq_len": how["workload"]["seq_len"]}
        self.examples = how["workload"]["microbatch_size"]
        self.steps = {}

    def build(self, name, microbatches, schedule=None):
        """Prepare a step and run it twice."""
        generator = torch.Generator().manual_seed(0)
        shape = microbatches * self.examples, self.sizes["seq_len"] + 1
        tokens = torch.randint(self.sizes["vocab_size"], shape, generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        prepare = self.single if schedule is None else self.pipelined
        self.steps[name] = prepare(inputs, targets, microbatches, schedule)
        self.step(name)
        return self.step(name)

    def step(self, name):
        """Run a step: loss, begin and end."""
        begin = time.monotonic()
        loss = self.steps[name]()
        return {"begin": begin, "end": time.monotonic(), "loss": loss}

    def drop(self, name):
        """Forget a step."""
        self.steps.pop(name, None)
        return {}

    def loss_of(self, count):
        """Summed cross-entropy over the number of the step's targets."""

        def loss(logits, targets):
            flat = logits.flatten(0, 1), targets.flatten()
            return F.cross_entropy(*flat, reduction="sum") / count

        return loss

    def single(self, inputs, targets, microbatches, _):
        """Microbatch after microbatch on one process."""
        model, loss_of = Stage(self.sizes, 0, 1), self.loss_of(targets.numel())
        pairs = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches)))

        def step():
            model.zero_grad(set_to_none=True)
            total = 0.0
            for x, y in pairs:
                loss = loss_of(model(x), y)
                loss.backward()
                total += loss.item()
            return total

        return step

    def pipelined(self, inputs, targets, microbatches, schedule):
        """A stage or two of the pipeline under one of PyTorch's schedules."""
        kind = getattr(pipelining, schedule)
        several = schedule != "Schedule1F1B"
        stages = self.size * (2 if several else 1)
        v_shaped = schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        own = [self.rank]
        if several:
            own.append(stages - 1 - self.rank if v_shaped else self.rank + self.size)
        modules = [Stage(self.sizes, stage, stages) for stage in own]
        pieces = [
            pipelining.PipelineStage(module, stage, stages, torch.device("cpu"))
            for module, stage in zip(modules, own)
        ]
        options = {"loss_fn": self.loss_of(targets.numel()), "scale_grads": False}
        runner = kind(pieces if several else pieces[0], microbatches, **options)
        arguments = (inputs,) if 0 in own else ()
        last = stages - 1 in own

        def step():
            for module in modules:
                module.zero_grad(set_to_none=True)
            losses = []
            runner.step(*arguments, target=targets if last else None, losses=losses)
            return float(sum(losses))

        return step


def main():
    """Serve commands until the input ends."""
    how = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if how["size"] > 1:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{how['port']}", rank=how["rank"], world_size=how["size"]
        )
    worker = Worker(how)
    print(json.dumps({"ready": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
