"""What the engine tests run inside the processes.

Each scenario goes through many engines in one world, because starting processes costs seconds. It returns
plain numbers; the tests judge them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import engine_worker as w
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwise.data.batch import MicroBatch, StepBatch
from shardwise.engines import descriptor
from shardwise.engines.runtime.protocol import Engine, World
from shardwise.errors import ShardwiseError
from shardwise.strategy import Strategy
from shardwise.training.nonfinite import FirstNonFinite
from shardwise.training.process import Ranks

DEEPSPEED = {
    "zero0": Strategy(engine="deepspeed", stage=0),
    "zero1": Strategy(engine="deepspeed", stage=1),
    "zero2": Strategy(engine="deepspeed", stage=2),
    "zero3": Strategy(engine="deepspeed", stage=3),
    "zero3-noreshard": Strategy(engine="deepspeed", stage=3, reshard=False),
    "zero2-offload": Strategy(engine="deepspeed", stage=2, offload_optimizer="cpu"),
    "zero3-offload": Strategy(engine="deepspeed", stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
}
FSDP = {
    "fsdp2": Strategy(engine="fsdp2"),
    "fsdp2-noreshard": Strategy(engine="fsdp2", reshard=False),
    "fsdp2-offload": Strategy(engine="fsdp2", offload_optimizer="cpu", offload_parameters="cpu"),
}
GROUPS = {
    "fsdp2-hsdp2": Strategy(engine="fsdp2", shard_group=2),
    "fsdp2-hsdp2-noreshard": Strategy(engine="fsdp2", shard_group=2, reshard=False),
    "zero3-hpz2": Strategy(engine="deepspeed", stage=3, shard_group=2),
}
"""On four processes: two groups of two."""
DDP = {"ddp": Strategy(engine="ddp"), "ddp-zero1": Strategy(engine="ddp-zero1")}
SINGLE = {"single": Strategy(engine="single")}
STEPS = range(3)


def engines(world: World) -> dict[str, Strategy]:
    """The engines of a world; bf16 of ZeRO-3 comes last, as DeepSpeed replaces torch's linear for good."""
    if world.size == 4:
        return GROUPS
    return {**(SINGLE if world.size == 1 else DDP), **FSDP, **DEEPSPEED}


def chosen(world: World) -> dict[str, Strategy]:
    """All engines with two processes; with one, those whose code differs there or that `auto` picks."""
    if world.size > 1:
        return engines(world)
    return {name: engines(world)[name] for name in ("single", "fsdp2", "zero2", "zero2-offload")}


def parity(folder: Path, world: World) -> dict[str, Any]:
    """How far every engine, model and way to accumulate is from float64."""
    kinds: dict[str, dict[str, bool]] = {"plain": {}, "tied": {"tied": True}, "lora": {"lora": True}}
    exact = {kind: w.reference(STEPS, **options) for kind, options in kinds.items()}
    results: dict[str, Any] = {}
    for name, bare in engines(world).items():
        for precision in ("fp32", "bf16"):
            for kind, options in kinds.items():
                # with a micro-batch that is neither the first nor the last where four fit
                most = min(4 if kind == "plain" else 2, w.GLOBAL_BATCH // world.size)
                for accumulation in (1, most) if (kind, precision) == ("plain", "fp32") else (most,):
                    strategy = replace(w.fitted(bare, world, accumulation), precision=precision)
                    engine = w.engine_for(strategy, world, **options)
                    steps = w.train(engine, strategy, STEPS)
                    losses, norms, weights = exact[kind]
                    found = dict(engine.weights())
                    assert found.keys() == weights.keys()
                    results[f"{name}/{precision}/{kind}/{accumulation}"] = {
                        "loss_error": worst([step.loss.item() for step in steps], losses),
                        "norm_error": worst([float(step.grad_norm) for step in steps], norms),
                        "weight_error": largest_difference(found, weights) if world.rank == 0 else 0.0,
                        "skipped": [step.skipped.item() for step in steps],
                    }
    return results


def mamba(folder: Path, world: World) -> dict[str, Any]:
    """Parity for Mamba, full and LoRA; its fp32 parameters; whether a resumed run goes on the same."""
    kinds: dict[str, dict[str, bool]] = {"full": {}, "lora": {"lora": True}, "few": {"few": True}}
    exact = {kind: w.reference(STEPS, model=w.mamba, **options) for kind, options in kinds.items()}
    results: dict[str, Any] = {}
    for name, bare in chosen(world).items():
        for precision, kind in (("fp32", "full"), ("bf16", "full"), ("bf16", "lora"), ("bf16", "few")):
            strategy = replace(w.fitted(bare, world, 2), precision=precision)
            engine = w.engine_for(strategy, world, model=w.mamba, **kinds[kind])
            steps = w.train(engine, strategy, STEPS)
            losses, norms, weights = exact[kind]
            found = snapshot(engine)
            assert found.keys() == weights.keys()
            kept = [t for n, t in found.items() if n.endswith(("A_log", ".D", "dt_proj.bias"))]
            results[f"{name}/{precision}/{kind}"] = {
                "loss_error": worst([step.loss.item() for step in steps], losses),
                "norm_error": worst([float(step.grad_norm) for step in steps], norms),
                "weight_error": largest_difference(found, weights) if world.rank == 0 else 0.0,
                "kept": len(kept),
                "fp32": all(t.dtype == torch.float32 and not same_in_bf16(t) for t in kept),
            }
            if precision == "bf16" and kind == "full":
                results[f"{name}/{precision}/full"]["resumed"] = resumes(engine, strategy, folder / name)
    return results


class Weighted(torch.nn.Module):
    """Every weight's gradient is the micro-batch's first token. Their number is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Linear(33, 31, bias=False, device="meta", dtype=torch.bfloat16)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        weight = float(batch.input_ids[0, 0])
        return self.block(torch.ones(1, 33, dtype=torch.bfloat16)).float().sum() * weight


def sums(folder: Path, world: World) -> dict[str, Any]:
    """What 512 and 63 ones add up to, and what the engine's descriptor says. In bf16 512 + 1 is 512."""
    in_groups = {"fsdp2-hsdp2-bf16": replace(GROUPS["fsdp2-hsdp2"], reduce_dtype="bf16")}
    results: dict[str, Any] = {}
    for name, bare in (engines(world) | (in_groups if world.size == 4 else {})).items():
        strategy = replace(bare, data_parallel=world.size, accumulation=64, clip_norm=0.0)
        module = Weighted()
        engine = w.build_engine(strategy, module, [module.block], w.make_fill(module), w.OPTIMIZER, world)
        tokens = torch.ones(64, 1, dtype=torch.long)
        tokens[0] = 512
        step = engine.step(
            [w.micro_batch(row[None], row[None]) for row in tokens], target_tokens=64, learning_rate=1e-3
        )
        total = float(step.grad_norm) * 64 / (world.size * math.sqrt(33 * 31))
        results[name] = {"total": total, "said": descriptor(strategy).sums_in_bf16(strategy, lora=False)}
    return results


def masks(folder: Path, world: World) -> dict[str, Any]:
    """How far engines are from float64 where the rows of one rank alone need a mask."""
    model = partial(w.decoder, kind="qwen2", hidden_size=48, head_dim=12)  # no variable-length kernel has 12
    whole, halves = w.rows(0), []
    for part in w.rows(1), w.rows(2):
        halves.append(w.micro_batch(part.input_ids[:2, :8], part.labels[:2, :8]))
    tokens, labels = (torch.cat([getattr(half, n) for half in halves], 1) for n in ("input_ids", "labels"))
    two = replace(
        w.micro_batch(tokens, labels),
        position_ids=torch.arange(8).repeat(2, 2),
        cu_seqlens=torch.arange(0, 40, 8, dtype=torch.int32),
        max_seqlen=8,
    )
    one = replace(w.micro_batch(whole.input_ids[:2], whole.labels[:2]), single_segment_rows=2)
    batches, target_tokens = [one, two], w.targets(one) + w.targets(two)

    exact, _ = model(torch.float64)
    w.make_fill(exact)(exact, torch.device("cpu"))
    loss = sum(exact(batch) for batch in (one, *halves)) / target_tokens
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters()])
    results: dict[str, Any] = {"packing": exact.packing}
    for name in ("zero3", "zero3-noreshard", "zero2", "fsdp2"):
        strategy = replace(w.fitted(engines(world)[name], world), micro_batch=2, precision="fp32")
        engine = w.engine_for(strategy, world, model=model)
        step = engine.step([batches[world.rank]], target_tokens=target_tokens, learning_rate=0.0)
        again = engine.step([batches[1 - world.rank]], target_tokens=target_tokens, learning_rate=0.0)
        results[name] = [
            [worst([found.loss.item()], [loss.item()]), worst([float(found.grad_norm)], [norm.item()])]
            for found in (step, again)
        ]
    return results


PARALLEL = {
    "autotp2-zero1": Strategy(engine="deepspeed", stage=1, tensor_parallel=2),
    "autotp2-zero2": Strategy(engine="deepspeed", stage=2, tensor_parallel=2),
}
PARALLEL_OFFLOAD = {
    "autotp2-zero2-offload": Strategy(
        engine="deepspeed", stage=2, tensor_parallel=2, offload_optimizer="cpu"
    ),
}
FAMILIES: dict[str, Any] = {
    "llama": w.llama,
    "qwen2-tied": partial(w.decoder, kind="qwen2", tie_word_embeddings=True),
    "qwen3": partial(w.decoder, kind="qwen3"),
    "gemma3": partial(w.decoder, kind="gemma3_text"),
    "gpt_neox": partial(w.decoder, kind="gpt_neox"),
}


def tensor_parallel(folder: Path, world: World) -> dict[str, Any]:
    """Parity under AutoTP, of models whose norms, biases and embeddings are cut or shared differently."""
    world = w.in_pairs(world)
    every = world.data_size == 1
    families = FAMILIES if every else {name: FAMILIES[name] for name in ("llama", "qwen3")}
    results: dict[str, Any] = {}
    for family, model in families.items():
        losses, norms, weights = w.reference(STEPS, model=model)
        for name, bare in (PARALLEL | (PARALLEL_OFFLOAD if family == "llama" else {})).items():
            for precision in ("fp32", "bf16") if family in ("llama", "qwen3") else ("fp32",):
                strategy = replace(w.fitted(bare, world, 2), precision=precision)
                engine = w.engine_for(strategy, world, model=model)
                steps = w.train(engine, strategy, STEPS)
                found = snapshot(engine)
                assert found.keys() == weights.keys()
                results[f"{name}/{precision}/{family}"] = {
                    "loss_error": worst([step.loss.item() for step in steps], losses),
                    "norm_error": worst([float(step.grad_norm) for step in steps], norms),
                    "first_norm_error": worst([float(steps[0].grad_norm)], norms[:1]),
                    "weight_error": largest_difference(found, weights) if world.rank == 0 else 0.0,
                    "resumed": resumes(engine, strategy, folder / f"{name}-{precision}-{family}", model),
                }
    return results


def tensor_parallel_checks(folder: Path, world: World) -> dict[str, Any]:
    """What AutoTP's engine does about a NaN, rows that differ, a model no plan fits, and evaluations."""
    apart, world = world, w.in_pairs(world)
    results: dict[str, Any] = {"nan": {}, "errors": {}}
    for name, bare in PARALLEL.items():
        for precision in ("fp32", "bf16"):
            strategy = replace(w.fitted(bare, world, 2), precision=precision)
            found = after_a_nan(strategy, world, folder / f"nan-{name}-{precision}")
            results["nan"][f"{name}/{precision}"] = found
    strategy = replace(w.fitted(PARALLEL["autotp2-zero1"], world, 2), precision="fp32")
    results["logits"] = loss_of_the_exported(strategy, world)
    engine = w.engine_for(strategy, world)
    mine = w.share(w.rows(0), strategy, apart)
    results["errors"]["rows"] = error_of(lambda: engine.step(mine, target_tokens=1, learning_rate=0.0))
    cohere = partial(w.decoder, kind="cohere", use_qk_norm=True)
    results["errors"]["norms"] = error_of(lambda: w.engine_for(strategy, world, model=cohere))
    return results


def loss_of_the_exported(strategy: Strategy, world: World) -> dict[str, Any]:
    """An evaluation after training, in the engine and in transformers with the engine's weights."""
    from transformers import LlamaForCausalLM

    engine = w.engine_for(strategy, world)
    w.train(engine, strategy, STEPS)
    weights = snapshot(engine)
    (batch,) = w.share(w.rows(77), replace(strategy, micro_batch=w.GLOBAL_BATCH), world)
    ours = engine.evaluate(batch).item()
    w.train(engine, strategy, range(4, 5))  # the weights that were looked at are still those it trains
    changed = not same(weights, snapshot(engine))
    if world.rank != 0:
        return {}
    module, _ = w.llama(torch.float32)
    model = LlamaForCausalLM(module.model.config)
    model.load_state_dict(weights)
    return {"ours": ours, "theirs": w.SummedLoss(model)(batch).item(), "changed": changed}


def error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except ShardwiseError as error:
        return [type(error).__name__, error.problems[0].what]
    return []


def resumes(engine: Engine, strategy: Strategy, place: Path, model: Any = w.mamba) -> bool:
    """Whether a new engine that loads what this one saves takes the same next step."""
    place.mkdir(exist_ok=True)
    dist.barrier()
    engine.save(place)
    w.train(engine, strategy, range(4, 5))
    other = w.engine_for(strategy, engine.world, model=model)
    w.train(other, strategy, range(9, 10))  # what is loaded has to replace this
    other.load(place)
    w.train(other, strategy, range(4, 5))
    return same(snapshot(engine), snapshot(other))


def quantization(folder: Path, world: World) -> dict[str, Any]:
    """Parity of adapters on a quantised base, what a rank stores of it, and whether a run can be resumed."""
    import quantized_worker as q

    results: dict[str, Any] = {}
    for kind, precision in (("int8", "bf16"), ("nf4", "fp32"), ("nf4", "bf16")):
        losses, norms, weights = q.reference(folder, kind, precision, STEPS)
        for name, bare in q.engines(world).items():
            strategy = replace(w.fitted(bare, world, 2), precision=precision)
            engine, built = q.engine_for(folder, kind, strategy, world)
            steps = w.train(engine, strategy, STEPS)
            found = snapshot(engine)
            assert found.keys() == weights.keys()
            results[f"{name}/{precision}/{kind}"] = {
                "loss_error": worst([step.loss.item() for step in steps], losses),
                "norm_error": worst([float(step.grad_norm) for step in steps], norms),
                "weight_error": largest_difference(found, weights) if world.rank == 0 else 0.0,
                "stored_bytes": q.stored_bytes(engine),
                "right": q.base_is_right(engine, built),
                "resumed": precision == "fp32"
                or q.resumes(engine, kind, strategy, folder / f"{name}-{kind}"),
            }
    return results


def gathered_codes(folder: Path, world: World) -> dict[str, Any]:
    """Whether FSDP2 gathers the codes of a quantised base bit for bit, with copies as on CUDA."""
    import quantized_worker as q

    torch._foreach_copy_ = q.copy_as_cuda  # type: ignore[assignment]
    results: dict[str, Any] = {}
    for kind, precision in product(("int8", "nf4"), ("bf16", "fp16")):
        strategy = w.fitted(Strategy(engine="fsdp2", precision=precision), world, 2)
        engine, _ = q.engine_for(folder, kind, strategy, world)
        results[f"{kind}/{precision}"] = q.codes_as_gathered(engine, q.build(folder, kind, precision))
    return results


LOSSY = {
    "fsdp2-reduce-bf16": Strategy(engine="fsdp2", reduce_dtype="bf16"),
    "fsdp2-hsdp2-reduce-bf16": Strategy(engine="fsdp2", shard_group=2, reduce_dtype="bf16"),
    "zero2-reduce-bf16": Strategy(engine="deepspeed", stage=2, reduce_dtype="bf16"),
    "zero3-reduce-bf16": Strategy(engine="deepspeed", stage=3, reduce_dtype="bf16"),
    "ddp-reduce-bf16": Strategy(engine="ddp", reduce_dtype="bf16"),
    "ddp-zero1-reduce-bf16": Strategy(engine="ddp-zero1", reduce_dtype="bf16"),
    "ddp-powersgd4": Strategy(engine="ddp", powersgd=4),
}
"""On four processes: what sums gradients in fewer bits."""
LOSSY_STEPS = range(20)


def lossy(folder: Path, world: World) -> dict[str, Any]:
    """In fp32, how far losses are from float64, and whether a resumed run goes on the same."""
    losses, _, _ = w.reference(LOSSY_STEPS)
    results: dict[str, Any] = {}
    for name, bare in LOSSY.items():
        strategy = replace(w.fitted(bare, world, 2), precision="fp32")
        engine = w.engine_for(strategy, world)
        found = [step.loss.item() for step in w.train(engine, strategy, LOSSY_STEPS)]
        results[name] = {
            "last": found[-1],
            "error": worst(found, losses),
            "resumed": resumes(engine, strategy, folder / name, w.llama),
        }
    return results


def fine_tuning(folder: Path, world: World) -> dict[str, Any]:
    import fine_tuning_worker

    names = ("ddp", "ddp-zero1", "fsdp2", "zero0", "zero1", "zero2", "zero3")
    return fine_tuning_worker.fine_tuning(folder, world, {name: engines(world)[name] for name in names})


def same_in_bf16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, tensor.bfloat16().to(tensor.dtype))


def resume(folder: Path, world: World) -> dict[str, Any]:
    """Whether saving after step 2 and going on in a new engine gives the same bits as not stopping.

    In full fp32 the new engine evaluates as well, before its first step, where it goes on and at the end:
    its losses, and whether that changes what it trains.
    """
    results: dict[str, Any] = {}
    held_out = w.rows(77)
    for name, bare in chosen(world).items():
        for precision, lora in (("fp32", False), ("bf16", False), ("bf16", True)):
            strategy = replace(w.fitted(bare, world, 2), precision=precision)
            straight = w.engine_for(strategy, world, lora=lora)
            w.train(straight, strategy, range(2))
            place = folder / f"{name}-{precision}-{lora}"
            place.mkdir(exist_ok=True)
            dist.barrier()
            straight.save(place)
            expected = w.train(straight, strategy, range(2, 4))
            resumed = w.engine_for(strategy, world, lora=lora)
            evaluates = precision == "fp32"
            losses = [evaluation(resumed, strategy, held_out)] if evaluates else []
            w.train(resumed, strategy, range(9, 10))  # what is loaded has to replace this
            resumed.load(place)
            losses += [evaluation(resumed, strategy, held_out)] if evaluates else []
            found = w.train(resumed, strategy, range(2, 4))
            losses += [evaluation(resumed, strategy, held_out)] if evaluates else []
            results[f"{name}/{precision}/{'lora' if lora else 'full'}"] = {
                "same": [step.loss.item() for step in expected] == [step.loss.item() for step in found]
                and [float(step.grad_norm) for step in expected] == [float(step.grad_norm) for step in found]
                and same(snapshot(straight), snapshot(resumed))
                and (bare != GROUPS["fsdp2-hsdp2"] or neighbours_share(place)),
                "losses": losses,
                "names": sorted(snapshot(resumed)),
            }
    return results


def evaluation(engine: Engine, strategy: Strategy, batch: MicroBatch) -> float:
    """The loss of a token of the batch, over all ranks."""
    total = sum(engine.evaluate(part) for part in w.share(batch, strategy, engine.world))
    assert isinstance(total, torch.Tensor)
    if engine.world.size > 1:
        dist.all_reduce(total)
    return total.item() / w.targets(batch)


def neighbours_share(place: Path) -> bool:
    """Whether ranks 0 and 1 hold different halves of the state, and ranks 2 and 3 the same as these."""
    parts = [load_file(place / f"rank-{rank:05d}.safetensors") for rank in range(4)]
    return same(parts[0], parts[2]) and same(parts[1], parts[3]) and not same(parts[0], parts[1])


def not_finite(folder: Path, world: World) -> dict[str, Any]:
    """What a step with a NaN does: whether it says so, and whether weights and later steps are untouched."""
    results = {}
    for name, bare in chosen(world).items():
        for precision in ("fp32", "bf16"):
            strategy = replace(w.fitted(bare, world, 2), precision=precision)
            results[f"{name}/{precision}"] = after_a_nan(strategy, world, folder / f"{name}-{precision}")
    return results


def after_a_nan(strategy: Strategy, world: World, saved: Path) -> dict[str, Any]:
    engine = w.engine_for(strategy, world)
    w.train(engine, strategy, range(2))
    before = snapshot(engine)
    saved.mkdir(exist_ok=True)
    dist.barrier()
    engine.save(saved)
    with poisoned(engine):
        (bad,) = w.train(engine, strategy, range(2, 3))
    (later,) = w.train(engine, strategy, range(3, 4))
    results = {
        "skipped": bad.skipped.item(),
        "reported": not bool(torch.isfinite(bad.loss + bad.grad_norm)),
        "untouched": same(before, snapshot(engine)),
        "later_skipped": later.skipped.item(),
    }
    if strategy.offload_optimizer != "none":
        return results  # DeepSpeed's sums on the host keep the NaN; a run has ended before
    engine.load(saved)
    (after,) = w.train(engine, strategy, range(2, 3))
    return {**results, "later_skipped": later.skipped.item() + after.skipped.item()}


def worst(found: list[float], expected: list[float]) -> float:
    """Largest relative error."""
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name].double() - expected[name]).abs().max()) for name in expected)


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """Rank 0's output head computes NaN for a while."""
    root = getattr(engine, "module", None) or engine._engine.module  # type: ignore[attr-defined]
    head = root.model.lm_head
    rank = engine.world.rank

    def poison(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (float("nan") if rank == 0 else 1.0)

    handle = head.register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()


class _NanBehind(torch.autograd.Function):
    """The gradient of the second token becomes NaN."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].index_fill(-2, torch.tensor(1), math.nan)


def nan_is_named(folder: Path, world: World) -> dict[str, Any]:
    """What is found of a NaN in the output of a block on the last rank, in its gradient, and of none."""
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "output": lambda hidden: hidden.index_fill(-2, torch.tensor(1), math.nan),
        "gradient": _NanBehind.apply,
        "none": torch.clone,
    }
    results = {}
    for name, bare in chosen(world).items():
        strategy = w.fitted(bare, world, 2)
        engine = w.engine_for(strategy, world)
        root = getattr(engine, "module", None) or engine._engine.module  # type: ignore[attr-defined]
        mine = w.share(w.rows(0), strategy, world)
        batch = StepBatch(micro_batches=mine, target_tokens=10, tokens=10, epoch=0)
        for what, change in changes.items():
            done = change if world.rank == world.size - 1 else torch.clone
            handle = root.model.model.layers[1].mlp.register_forward_hook(lambda *seen, f=done: f(seen[2]))
            results[f"{name}/{what}"] = FirstNonFinite(root.model, str).find(engine, Ranks(world), batch)
            handle.remove()
    return results


SCENARIOS = {
    "nan_is_named": nan_is_named,
    "parity": parity,
    "resume": resume,
    "not_finite": not_finite,
    "mamba": mamba,
    "masks": masks,
    "sums": sums,
    "tensor_parallel": tensor_parallel,
    "tensor_parallel_checks": tensor_parallel_checks,
    "quantization": quantization,
    "gathered_codes": gathered_codes,
    "lossy": lossy,
    "fine_tuning": fine_tuning,
}


def main(name: str, place: str) -> None:
    """In each of the processes."""
    folder = Path(place)
    world = w.join()
    result = SCENARIOS[name](folder, world)
    if world.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
