"""The seam of objectives: engines and tracer need no more of it than the protocol says."""

from __future__ import annotations

import torch

from fake_objective import FakeObjective
from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.runtime.protocol import World
from shardwise.engines.single.runtime import SingleEngine
from shardwise.job.schema import Data, Job, Model, Optimizer, Train
from shardwise.objective import objective_of
from shardwise.objective.causal_lm import CausalLM
from shardwise.strategy import Strategy

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)


def batch(*labels: list[int]) -> MicroBatch:
    rows = torch.tensor(labels)
    return MicroBatch(
        input_ids=torch.arange(rows.numel()).view_as(rows) % 8,
        labels=rows,
        position_ids=torch.arange(rows.shape[1]).expand_as(rows),
        cu_seqlens=torch.arange(len(rows) + 1, dtype=torch.int32) * rows.shape[1],
        max_seqlen=rows.shape[1],
    )


def test_an_engine_trains_any_objective_and_divides_by_the_steps_targets() -> None:
    torch.manual_seed(0)
    objective = FakeObjective()
    vectors, weight = (p.detach().double().requires_grad_() for p in objective.parameters())
    strategy = Strategy(engine="single", micro_batch=2, precision="fp32")
    optimizer = Optimizer(weight_decay=0.0)
    engine = SingleEngine(strategy, objective, [], lambda module, device: None, optimizer, WORLD)
    micro_batches = [batch([1, 2], [3, IGNORED]), batch([IGNORED, 4], [5, 6])]
    targets = sum(int((b.labels != IGNORED).sum()) for b in micro_batches)
    terms = [((vectors[b.input_ids] @ weight[0] - b.labels) ** 2)[b.labels != IGNORED] for b in micro_batches]
    loss = torch.cat(terms).sum() / targets
    gradients = torch.autograd.grad(loss, (vectors, weight))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    result = engine.step(micro_batches, target_tokens=targets, learning_rate=1e-2)
    torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.grad_norm.double(), norm, rtol=1e-6, atol=0)


def test_the_tracers_input_is_a_batch_of_the_objectives_kind() -> None:
    made = FakeObjective.batch_kind.on_meta(3, 16, single_segment_rows=2)
    assert {name: tuple(t.shape) for name, t in made.tensors().items()} == {
        "input_ids": (3, 16), "labels": (3, 16), "position_ids": (3, 16), "cu_seqlens": (4,)
    }  # fmt: skip
    assert (made.max_seqlen, made.single_segment_rows) == (16, 2)
    assert all(tensor.is_meta for tensor in made.tensors().values())
    assert FakeObjective().to("meta")(made).dtype == torch.float32


def test_a_job_trains_causal_language_modelling() -> None:
    job = Job(
        name="a",
        model=Model(source="tiny-llama", weights="random"),
        data=Data(train="a.jsonl", packing=False),
        train=Train(),
    )
    made = objective_of(job)
    assert (made.func, made.keywords) == (CausalLM, {"packed": False})
