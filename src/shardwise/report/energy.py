"""A run's energy: what it used and cost, how sure that is, and what its power limits did.

All of it is of GPUs alone, without network and power supplies; CPU and DRAM are apart. An error is the most
that a number may be off because readings of the counter are up to 0.2 s old: 0.2 s of power for each stretch
of steps.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardwise.energy import END_SECONDS
from shardwise.record.energy import read_used
from shardwise.record.read import RunRecord
from shardwise.units import JOULES_PER_KWH, SECONDS_PER_HOUR, count

NUMBERS = ("joules_per_step", "joules_per_token", "watts", "kwh", "cost", "carbon_grams")
LEAST_SECONDS = 1.0  # over less, readings that are 0.2 s old say little


def energy(run: RunRecord, steady: Sequence[Mapping[str, Any]], *, gpu_seconds: float) -> dict[str, Any]:
    """The numbers NUMBERS, each with NAME_error and NAME_unavailable; and `phases_kwh`, `limit`, `simulated`.

    `watts` is of all GPUs in `steady` steps, `gpu_seconds` all launches' time times their processes. `kwh`,
    `cost` and `carbon_grams` are of all launches, evaluations and saves too; `cost_of`: what the cost holds.
    `host_kwh` has `cpu` and `dram` of all nodes, `host_unavailable` the reason why one is missing.
    """
    found = {**_steps(steady), **_used(run, gpu_seconds / SECONDS_PER_HOUR)}
    power = [event for event in run.events if event.get("kind") == "power"]
    heads = [event for event in run.events if event.get("kind") == "run"]
    choice = next((event for event in reversed(power) if event["what"] == "choice"), None)
    end: Mapping[str, Any] = next((event for event in reversed(power) if event["what"] == "end"), {})
    keys = [f"{name}{part}" for name in NUMBERS for part in ("", "_error", "_unavailable")]
    return {
        "simulated": any(head.get("energy_source") == "simulated" for head in heads),
        **{key: found.get(key) for key in keys},
        "cost_of": found.get("cost_of"),
        "phases_kwh": found.get("phases_kwh"),
        "host_kwh": found.get("host_kwh"),
        "host_unavailable": found.get("host_unavailable"),
        "limit_watts": None if choice is None else choice["watts"],
        "limit_reasons": [] if choice is None else choice["reasons"],
        "saved_joules": end.get("saved_joules"),
        "saved_seconds": end.get("saved_seconds"),
    }


def lines(found: Mapping[str, Any]) -> dict[str, str]:
    """The energy of a run as rows of a table: label and text."""
    flag = "SIMULATED: " if found["simulated"] else ""
    why = found["joules_per_step_unavailable"]
    if why and why == found["kwh_unavailable"]:
        return {"energy": f"- ({why})"}
    units = {"joules_per_token": "J/token", "joules_per_step": "J/step", "watts": "W"}
    each = ", ".join(_text(found, name, unit) for name, unit in units.items())
    units = {"kwh": "kWh", "cost": f"for {found['cost_of']}", "carbon_grams": "gCO2e"}
    total = ", ".join(
        _text(found, name, unit) for name, unit in units.items() if name == "kwh" or found[name] is not None
    )
    rows = {"energy": flag + (f"- ({why})" if why else each), "energy used": flag + total}
    if found["host_kwh"] is not None:
        parts = [f"{name.upper()} {count(kwh)} kWh" for name, kwh in found["host_kwh"].items()]
        missing = found["host_unavailable"]
        for why in dict.fromkeys(missing.values()):
            names = " and ".join(name.upper() for name in missing if missing[name] == why)
            parts.append(f"no {names}: {why}")
        rows["host energy"] = "; ".join(parts)
    if found["limit_watts"] is not None:
        saved = found["saved_joules"]
        text = "" if saved is None else f"; {saved / 1000:+.3g} kJ saved in the last launch, search included"
        rows["power limit"] = f"{flag}{found['limit_watts']} W chosen{text}"
    return rows


def _text(found: Mapping[str, Any], name: str, unit: str) -> str:
    value, error = found[name], found[f"{name}_error"]
    if value is None:
        return f"no {unit}: {found[f'{name}_unavailable']}"
    share = f" ± {100 * error / value:.2g} %" if error and value else ""
    return f"{count(value)} {unit}{share}"


def _steps(steady: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = [step for step in steady if step.get("joules") is not None]
    seconds = sum(step["seconds"] for step in known)
    if seconds < LEAST_SECONDS:
        reason = next((step.get("joules_unavailable") for step in steady if not known), None) or "no reading"
        reason = reason if not known else f"{seconds:.1f} s of readings are too short for the counter"
        return {f"{name}_unavailable": reason for name in NUMBERS[:3]}
    joules, tokens = sum(step["joules"] for step in known), sum(step["tokens"] for step in known)
    numbers = [step["step"] for step in known]
    stretches = 1 + sum(after != before + 1 for before, after in pairwise(numbers))
    share = stretches * END_SECONDS / seconds
    values = (joules / len(known), joules / tokens, joules / seconds)
    return {
        key: part
        for name, value in zip(NUMBERS, values, strict=False)
        for key, part in ((name, value), (f"{name}_error", share * value))
    }


def _used(run: RunRecord, hours: float) -> dict[str, Any]:
    used, job = read_used(run.path), run.job.get("energy") or {}
    if used is None:
        reasons = (event.get("kwh_unavailable") for event in reversed(run.events))
        reason = next((one for one in reasons if one), "no step is metered")
        return {f"{name}_unavailable": reason for name in NUMBERS[3:]}
    kwh, error = used.kwh, used.kwh * used.error_joules / used.joules if used.joules else 0.0
    found: dict[str, Any] = {"kwh": kwh, "kwh_error": error}
    found["phases_kwh"] = {
        name: joules * kwh / used.joules for name, joules in (used.phases or {}).items() if joules
    }
    if used.host is not None:
        found["host_kwh"] = {part: joules / JOULES_PER_KWH for part, joules in used.host.items()}
        found["host_unavailable"] = dict(used.host_unavailable or {})
    per_kwh, per_hour, grams = (
        job.get(key) for key in ("price_per_kwh", "price_per_gpu_hour", "carbon_g_per_kwh")
    )
    parts = {"energy": per_kwh is not None, "GPU-hours": per_hour is not None}
    if any(parts.values()):
        found["cost"] = kwh * (per_kwh or 0.0) + hours * (per_hour or 0.0)
        found["cost_error"] = error * (per_kwh or 0.0)
        found["cost_of"] = " and ".join(name for name, given in parts.items() if given)
    else:
        found["cost_unavailable"] = "the job has no energy.price_per_kwh and no energy.price_per_gpu_hour"
    if grams is None:
        found["carbon_grams_unavailable"] = "the job has no energy.carbon_g_per_kwh"
    else:
        found |= {"carbon_grams": kwh * grams, "carbon_grams_error": error * grams}
    return found
