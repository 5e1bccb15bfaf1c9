"""Energy of a step: what a GPU draws for being on, what each operator adds, and their sum."""

from shardwise.hardware.catalog import Gpu
from shardwise.simulate.prediction import Energy, Time
from shardwise.simulate.step_trace import FP32, Op
from shardwise.simulate.time.roofline import COMPUTING, attention_kernel, filled, instructions, table


class Draw:
    """Energy that one GPU draws (`[energy]` of `efficiency.toml`).

    E = constant watts x seconds + joules per FLOP x FLOPs + joules per byte x bytes moved, as in the roofline
    model of energy (Choi, Bedard, Fowler, Vuduc 2013, IPDPS). GPUs only, without CPUs, network and power
    supplies. Constant draw and FLOPs are shares of its power limit; a byte costs as much as on the H200.
    """

    def __init__(self, gpu: Gpu) -> None:
        rules = table()["energy"]
        half = max(gpu.flops.get("bf16", 0.0), gpu.flops.get("fp16", 0.0), gpu.flops["fp32"])
        self.constant_watts: float = rules["constant"] * gpu.power_watts
        self.limit_watts: float = rules["limit"] * gpu.power_watts
        peaks = {"matmul": half, "attention": half, "fp32": gpu.flops["fp32"], "scan": gpu.flops["fp32"]}
        self._flop: dict[str, float] = {
            kind: rules[kind] * gpu.power_watts / peak for kind, peak in peaks.items()
        }
        self._byte: float = rules["joules_per_byte"]
        self._link_byte: float = rules["joules_per_link_byte"]

    def joules(self, op: Op) -> float:
        """Joules of one operator, without the constant draw."""
        moving = self.moving(op.read_bytes + op.written_bytes)
        if op.kind not in COMPUTING:
            return moving
        flops, kind = op.flops, op.kind
        if kind == "scan":
            flops = 2 * instructions(op)
        elif op.item_bytes == FP32:
            kind = "fp32"
        elif kind == "attention":  # with heads filled up to its kernel's size
            flops *= filled(op.shape[5], table()["attention"][attention_kernel(op)]["heads"])
        return flops * self._flop[kind] + moving

    def moving(self, num_bytes: float) -> float:
        """Joules of kernels that read and write `num_bytes` and compute little."""
        return num_bytes * self._byte

    def linking(self, num_bytes: float) -> float:
        """The same of collectives and copies, which send them over links as well."""
        return num_bytes * self._link_byte

    def powered_seconds(self, joules: float) -> float:
        """Least seconds of work of so many joules: above its power limit the GPU lowers its clock."""
        return joules / (self.limit_watts - self.constant_watts)


def predict_energy(gpu: Gpu, time: Time, *, work_joules: float, gpus: int) -> Energy:
    """Energy of one optimizer step on all `gpus`; `work_joules`: one GPU's, without the constant draw."""
    idle = Draw(gpu).constant_watts * time.step_seconds
    return Energy(
        joules_per_step=(idle + work_joules) * gpus,
        idle_joules=idle * gpus,
        tokens_per_step=time.tokens_per_step,
        at_power_limit=time.step_seconds > time.full_clock_seconds,
    )
