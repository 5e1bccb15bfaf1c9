"""DeepSpeed's own checkpoint files are pickles, which can run code: what they may name (decision 0061)."""

from pathlib import Path

from torch.serialization import get_unsafe_globals_in_checkpoint

from shardwise.errors import CheckpointError

ALLOWED = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""What DeepSpeed 0.19.8 puts into its files that torch does not load by itself: plain values."""


def check_pickles(folder: Path) -> None:
    """Raise CheckpointError where a file below `folder` names what is not allowed. Nothing is loaded."""
    for path in sorted(folder.rglob("*.pt")):
        try:
            named = set(get_unsafe_globals_in_checkpoint(path)) - ALLOWED
            what = f"it would call {', '.join(sorted(named))} when it is loaded"
        except Exception as error:  # noqa: BLE001 - a file by somebody else
            named, what = {""}, f"it is no file that torch.save has written ({type(error).__name__}: {error})"
        if named:
            fix = "resume from an older checkpoint; --trust-checkpoint loads it, with all that it may do"
            raise CheckpointError(what, where=str(path), fix=fix)
