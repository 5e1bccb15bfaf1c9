"""What a client of `serve` may ask: the parts of OpenAI's API that have an effect here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardwise.inference.sampling import Sampling

MOST_TOKENS = 4096  # New tokens of one answer: the others wait for it

_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
_WITHOUT_EFFECT |= {"prompt_cache_key"}
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", "none", "auto", {}, [], {"type": "text"})

_Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
_Stop = Annotated[str, Field(min_length=1, max_length=200)]


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part]
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Request(BaseModel):
    """What chat and text completions share, with OpenAI's defaults."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=8)] | None = None
    n: Literal[1] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Null is OpenAI's word for a default."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _has_only_what_has_an_effect(self) -> "_Request":
        for name, value in (self.model_extra or {}).items():
            if name not in _WITHOUT_EFFECT and value not in _NEUTRAL:
                raise ValueError(f"{name[:100]!r} is not supported here")
        return self

    def sampling(self) -> Sampling:
        """The options as the model takes them."""
        most = self.max_completion_tokens or self.max_tokens or MOST_TOKENS
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        chosen = (self.temperature, self.top_p, self.top_k, self.repetition_penalty)
        return Sampling(most, *chosen, stop, self.seed)


class ChatRequest(_Request):
    messages: Annotated[list[_Message], Field(min_length=1)]


class TextRequest(_Request):
    prompt: str
