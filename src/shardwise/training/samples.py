"""What the model writes while it is trained: a few prompts at each evaluation, continued greedily.

Every rank computes the same tokens, without a cache, through the engine, which gathers sharded weights.
"""

from collections.abc import Callable

import torch

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.data.chat import Renderer, end_token, starts_with_bos
from shardwise.data.formats import Conversation
from shardwise.engines.runtime.protocol import Engine
from shardwise.errors import JobError
from shardwise.training.ready import Ready

MOST_TOKENS = 48


def make_samples(ready: Ready, engine: Engine) -> Callable[[], list[tuple[str, str]]]:
    """A function that gives each prompt with its continuation. Collective. JobError: a prompt is too long."""
    job, tokenizer, prompts = ready.job, ready.tokenizer, ready.job.train.sample_prompts
    if not prompts:
        return list
    if ready.strategy.pipeline > 1:
        what = "a pipeline hands no logits to all of its stages, so no samples can be written"
        raise JobError(what, where="train.sample_prompts", fix="leave it out, or another strategy")
    begin = (
        [tokenizer.bos_token_id] if starts_with_bos(tokenizer) and ready.data.chat_template is None else []
    )
    rows = [begin + tokenizer(text, add_special_tokens=False)["input_ids"] for text in _texts(ready)]
    room = min(MOST_TOKENS, job.data.sequence_length - max(map(len, rows)))
    if room < 1:
        what = "a prompt leaves no room for an answer in data.sequence_length"
        raise JobError(what, where="train.sample_prompts", fix="shorten it")
    end, device = end_token(tokenizer)[1], engine.world.device

    def sample() -> list[tuple[str, str]]:
        written = []
        for prompt, row in zip(prompts, rows, strict=True):
            ids = list(row)
            for _ in range(room):
                at = torch.tensor([len(ids) - 1], device=device)
                ids.append(int(engine.evaluate(_batch(ids).to(device), at).argmax()))
            new = ids[len(row) :]
            written.append((prompt, tokenizer.decode(new[: new.index(end)] if end in new else new)))
        return written

    return sample


def _batch(ids: list[int]) -> MicroBatch:
    row = torch.tensor([ids])
    positions, borders = torch.arange(len(ids))[None], torch.tensor([0, len(ids)], dtype=torch.int32)
    return MicroBatch(
        input_ids=row, labels=torch.full_like(row, IGNORED), position_ids=positions, cu_seqlens=borders,
        max_seqlen=len(ids), single_segment_rows=1,
    )  # fmt: skip


def _texts(ready: Ready) -> list[str]:
    """The prompts as they are, or as a user's messages where the model is trained on conversations."""
    prompts, template, system = (
        ready.job.train.sample_prompts,
        ready.data.chat_template,
        ready.job.data.system,
    )
    if template is None:
        return prompts
    head = [{"role": "system", "content": system}] if system else []
    asked = [Conversation("train.sample_prompts", [*head, {"role": "user", "content": p}]) for p in prompts]
    with Renderer(ready.tokenizer, template, answers_only=False, invite=True) as renderer:
        found = [result for _, result in renderer.render(asked)]
    if bad := [one for one in found if isinstance(one, str)]:
        raise JobError(bad[0], where="train.sample_prompts", fix="another data.chat_template")
    return [one[0].text for one in found if not isinstance(one, str)]
