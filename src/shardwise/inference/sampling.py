"""How the next token is chosen, and when an answer ends."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Options of one answer; the defaults take the likeliest token, as often as the model likes."""

    max_new_tokens: int = 100
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that hold this much probability; 1 is all."""
    top_k: int = 0
    """Sample only from so many of the likeliest tokens; 0 is all."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that were seen (Keskar et al., CTRL, 2019); 1 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are no part of it."""
    seed: int | None = None
    """None: another one for each answer."""
