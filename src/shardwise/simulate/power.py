"""A step under a lower power limit: its time and joules, from the prediction at the card's own limit.

The GPU lowers its clock until it draws the limit on average. With f, the clock as a share of the full one:

    time(f)   = full-clock time + max(0, clocked seconds x (1/f - 1) - slack)
    joules(f) = constant watts x time(f) + work joules x (V(f) / V(f0))^2

Only compute-bound kernels follow the clock; memory, links and the host do not. Slack is what the GPU waits
for the host. f0 is the clock at the card's own limit, where work joules are known. V is `[voltage]` of
`efficiency.toml`: dynamic energy of CMOS is C V^2 a switch. It is a limit on the average of a step: where
bursts of work and waits alternate slowly, a GPU may be slower than this.
"""

from dataclasses import dataclass, replace

from shardwise.hardware.catalog import Gpu
from shardwise.simulate.energy import Draw
from shardwise.simulate.prediction import Prediction, Time
from shardwise.simulate.time.roofline import table

LEAST_CLOCK = 0.1
"""210 MHz of 1980: the lowest clock of an H100."""

HALVINGS = 40

STEP_WATTS, SMALL_STEP_WATTS = 25, 5
"""Between two limits; the small one on cards below 200 W."""


def levels(gpu: Gpu) -> tuple[int, ...]:
    """Power limits below the card's own that may be planned with, watts, descending.

    Multiples of a step within the card's range, down to the least share of the default limit that the model
    was calibrated for. None where the range is not known.
    """
    if gpu.power_range_watts is None:
        return ()
    step = STEP_WATTS if gpu.power_watts >= 200 else SMALL_STEP_WATTS
    least = max(gpu.power_range_watts[0], table()["voltage"]["least_limit"] * gpu.power_watts)
    highest = (gpu.power_watts - 1) // step * step
    return tuple(watts for watts in range(highest, 0, -step) if watts >= least)


def energy_error(gpu: Gpu) -> tuple[float, bool]:
    """Worst error of a predicted energy ratio, as a share, and whether a sweep of this card was measured."""
    rules = table()["voltage"]
    swept = gpu.name in rules["swept"]
    error: float = rules["error" if swept else "error_elsewhere"]
    return error, swept


def voltage(clock: float) -> float:
    """The core's voltage at a share of the full clock, as a share of that at full clock."""
    rules = table()["voltage"]
    floor: float = rules["floor"]
    slope: float = (1 - floor) / (1 - rules["clock"])
    return max(floor, 1 - slope * (1 - clock))


@dataclass(frozen=True, kw_only=True)
class Work:
    """One GPU's step as a function of the clock."""

    full_clock_seconds: float
    clocked_seconds: float
    slack_seconds: float
    """What slower kernels fill before the step takes longer."""
    constant_watts: float
    joules: float
    """Of the work, at `clock`."""
    clock: float = 1.0

    @classmethod
    def of(cls, prediction: Prediction) -> "Work":
        """The work of a prediction for the card's own limit."""
        time, energy = prediction.time, prediction.energy
        full, clocked = time.full_clock_seconds, time.clocked_seconds
        slack = _slack_seconds(time, full)
        longer = time.step_seconds - full + (slack if time.step_seconds > full else 0.0)
        return cls(
            full_clock_seconds=full,
            clocked_seconds=clocked,
            slack_seconds=slack,
            constant_watts=energy.idle_joules / time.world_size / time.step_seconds,
            joules=(energy.joules_per_step - energy.idle_joules) / time.world_size,
            clock=max(LEAST_CLOCK, clocked / (clocked + longer)) if clocked else 1.0,
        )

    def seconds(self, clock: float) -> float:
        """Of the step."""
        longer = self.clocked_seconds * (1 / clock - 1) - self.slack_seconds
        return self.full_clock_seconds + max(0.0, longer)

    def work_joules(self, clock: float) -> float:
        """Without the constant draw."""
        return self.joules * (voltage(clock) / voltage(self.clock)) ** 2

    def clock_within(self, watts: float) -> float:
        """The highest clock, at most that of the card's own limit, with which the step draws `watts`."""
        low, high = LEAST_CLOCK, self.clock
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            drawn = self.work_joules(middle) / self.seconds(middle) + self.constant_watts
            low, high = (low, middle) if drawn > watts else (middle, high)
        return low


def under_limit(prediction: Prediction, gpu: Gpu, limit_watts: float) -> Prediction:
    """The prediction with another power limit on each GPU.

    The same value where the limit does not bind: at the card's own limit and above, and where the step draws
    less. Otherwise the step takes longer, and its joules are those at the lower clock.
    """
    time = prediction.time
    drawn = prediction.energy.joules_per_step / time.world_size / time.step_seconds
    watts = limit_watts * Draw(gpu).limit_watts / gpu.power_watts
    if limit_watts >= gpu.power_watts or drawn <= watts:
        return prediction
    work = Work.of(prediction)
    clock = work.clock_within(watts)
    joules = work.work_joules(clock)
    # work that does not follow the clock waits for the limit, too
    seconds = max(time.step_seconds, work.seconds(clock), joules / (watts - work.constant_watts))
    idle = work.constant_watts * seconds
    energy = replace(
        prediction.energy,
        joules_per_step=(idle + joules) * time.world_size,
        idle_joules=idle * time.world_size,
        at_power_limit=True,
    )
    return replace(prediction, time=replace(time, step_seconds=seconds), energy=energy)


def _slack_seconds(time: Time, full_clock_seconds: float) -> float:
    """How long the GPU waits for the host in a step at full clock.

    Neither waits for communication and copies, nor what collectives take from the computation.
    """
    waits = time.exposed_communication_seconds + time.exposed_to_copies_seconds + time.contended_seconds
    return max(0.0, full_clock_seconds - time.compute_seconds - waits)
