"""Joules of an optimizer step: the constant draw of all GPUs for its seconds, and what their work adds.

E = constant watts x seconds + joules per FLOP x FLOPs + joules per byte x bytes (`power.py`). GPUs only:
neither processors nor network, fans and power supplies are in it.
"""

from __future__ import annotations

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.power import Draw
from shardwise.simulate.prediction import Energy, Time
from shardwise.simulate.timeline import Played
from shardwise.strategy.strategy import Strategy


def predict_energy(strategy: Strategy, hardware: Hardware, time: Time, played: Played) -> Energy:
    """The energy of one optimizer step on all GPUs; `time`: what `predict_time` says of `played`."""
    idle = Draw(hardware.gpu).constant_watts * time.step_seconds
    work = played.totals.joules
    return Energy(
        joules_per_step=(idle + work) * strategy.world_size,
        idle_joules=idle * strategy.world_size,
        tokens_per_step=time.tokens_per_step,
    )
