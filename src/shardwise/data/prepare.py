"""The job's data as tokens: read, checked, rendered, tokenised, cached, and a share of it held out."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from shardwise import folders
from shardwise.data.cache import FORMAT, Entry, TokenDataset, Writer, load_or_build
from shardwise.data.chat import Encoded, Encoder, Renderer, Tokens, template_for, unknown_markers
from shardwise.data.formats import Conversation, Reader, Sample
from shardwise.data.packing import permutation, rows_of_epoch, taken
from shardwise.data.render import Rendered
from shardwise.data.sources import Findings, Source, Text, open_sources
from shardwise.errors import DataError
from shardwise.job.schema import Data, Job

BATCH_SAMPLES = 256
BATCH_CHARS = 2 << 20  # samples are tokenised together up to these numbers, which bounds the memory
KEPT_SHARES = (0.95, 0.99, 0.999, 1.0)
"""Of the conversations' tokens: a longer row is found that keeps the first one which at least halves what is
lost. Where little is lost, 95 % would be less than the present length keeps."""
ROUND_LENGTH = 64  # to multiples of this
SHOWN_TOKENS = 2048  # at most this many tokens of the first sample are shown


@dataclass(frozen=True)
class RenderedSample:
    """A sample for people to look at."""

    runs: list[tuple[str, bool]]  # text in order, each run with whether its tokens are trained
    tokens: int


@dataclass(frozen=True)
class Prepared:
    train: TokenDataset
    eval: TokenDataset | None
    summary: dict[str, Any]
    """Counts and formats as plain values; `key` is a hash of the data's inputs and options."""
    content: str  # a hash of the tokens themselves, and of the held-out share
    sample: RenderedSample  # the first training sample
    chat_template: str | None  # the Jinja text that conversations were rendered with; None for plain text


@dataclass
class Counts:
    """Samples at each stage, and tokens. `read` = `bad` + `too_long` + `without_target` + the rest."""

    read: int = 0
    bad: int = 0
    too_long: int = 0  # conversations dropped because they are longer than a row
    truncated: int = 0  # conversations cut to the length of a row, of which something is trained
    without_target: int = 0  # conversations and pieces of text dropped because no token of them is trained
    lost_tokens: int = 0  # tokens of conversations that a longer row would have kept
    longer_row: int = 0  # tokens a row needs to keep `longer_row_keeps` of them, where any are lost
    longer_row_keeps: float = 0.0  # one of KEPT_SHARES
    split: int = 0  # conversations that became several samples because the template rewrites earlier turns
    samples: int = 0  # tokenised samples: conversations, or pieces of text no longer than a row


def prepare(
    job: Job, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, cache_root: Path | None = None
) -> Prepared:
    """Return the job's tokenised training and held-out data, from the cache where possible.

    vocab_size: rows of the model's embedding. cache_root: default is `$SHARDWISE_CACHE`, else
    `~/.cache/shardwise`. Every process of a machine may call this at once: one builds, the others wait.
    Raises DataError for any fault of the data.
    """
    data = job.data
    build = _Build(data, tokenizer, vocab_size, cache_root or folders.cache_root())
    entries = [build.dataset(data.train, key="data.train")]
    (train, note, _), held_out, sets = entries[0][1], None, None
    every = train.starts  # also of the samples that are held out
    if data.weights is not None:
        names = [data.train] if isinstance(data.train, str) else data.train
        opened = [
            open_sources(name, split=data.split, subset=data.subset, key="data.train") for name in names
        ]
        of_set = np.repeat(np.arange(len(names)), [len(sources) for sources in opened])
        sets = np.repeat(of_set, note["of_sources"])
        train = replace(train, weights=np.array(data.weights)[sets])
    if data.eval is not None:
        entries.append(build.dataset(data.eval, key="data.eval"))
        held_out = entries[1][1].dataset
    elif data.eval_fraction > 0:
        train, held_out = hold_out(train, data.eval_fraction, seed=job.train.seed)
    split = str(data.eval_fraction)
    template = None if note["formats"] == ["text"] else build.template
    unknown = unknown_markers(tokenizer, template) if template and data.chat_template else []
    return Prepared(
        train=train,
        eval=held_out,
        summary=_summary(job, note, train, held_out)
        | ({} if sets is None else {"drawn": _drawn(job, train, sets[np.searchsorted(every, train.starts)])})
        | {"key": _hash(*(key for key, _ in entries), split)}
        | ({"unknown_markers": unknown} if unknown else {}),
        content=_hash(*(entry.sha256 for _, entry in entries), split),
        sample=_show(train, tokenizer),
        chat_template=template,
    )


def documents(job: Job) -> Iterator[str]:
    """Yield the raw text of the training data, one message, document or part of a document at a time."""
    data = job.data
    sources = open_sources(data.train, split=data.split, subset=data.subset, key="data.train")
    for sample in Reader(sources, data):
        if isinstance(sample, Text):
            yield sample.text
        else:
            yield from (message["content"] for message in sample.messages if message["content"])


def hold_out(dataset: TokenDataset, fraction: float, *, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """(rest, held out): a random share of the conversations or pieces of text, at least one on each side."""
    groups, member = np.unique(dataset.groups, return_inverse=True)
    if len(groups) < 2:
        what = "the data is a single sample; none can be held out for evaluation"
        fix = "set it to 0, name data.eval, or train on more data"
        raise DataError(what, where="data.eval_fraction", fix=fix)
    count = min(max(1, round(fraction * len(groups))), len(groups) - 1)
    out = np.zeros(len(groups), dtype=bool)
    out[permutation(len(groups), seed)[:count]] = True
    chosen = out[member]
    return dataset.subset(np.flatnonzero(~chosen)), dataset.subset(np.flatnonzero(chosen))


def _hash(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


@dataclass
class _Build:
    """Turns files into cache entries, all with the same tokenizer and options."""

    data: Data
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    root: Path

    def __post_init__(self) -> None:
        self.template = template_for(self.tokenizer, self.data.chat_template)
        self._identity = _tokenizer_identity(self.tokenizer)

    def dataset(self, spec: str | list[str], *, key: str) -> tuple[str, Entry]:
        sources = open_sources(spec, split=self.data.split, subset=self.data.subset, key=key)
        deciding = {"format", "max_samples", "sequence_length", "loss_on", "system", "too_long", "skip_bad"}
        content = {
            "version": FORMAT,
            "sources": [source.fingerprint() for source in sources],
            "tokenizer": self._identity,
            "template": self.template,
            "vocab_size": self.vocab_size,
            **self.data.model_dump(include=deciding),
        }
        name = _hash(json.dumps(content, sort_keys=True))
        return name, load_or_build(self.root, name, lambda writer: self._fill(writer, sources, key))

    def _fill(self, writer: Writer, sources: list[Source], key: str) -> dict[str, Any]:
        reader = Reader(sources, self.data, key=key)
        encoder = Encoder(self.tokenizer, vocab_size=self.vocab_size)
        rows = _RowWriter(writer, self.data.sequence_length, self.data.too_long)
        of_sources = []
        with Renderer(self.tokenizer, self.template, answers_only=self.data.loss_on == "answers") as renderer:
            for samples in reader.each():
                before = len(writer)
                for batch in _batches(samples):
                    if reader.bad.fatal:
                        continue  # reading on only to count
                    if isinstance(batch[0], Text):
                        for text, tokens in encoder.documents(batch):
                            rows.document(text, tokens)
                    else:
                        _conversations(batch, renderer, encoder, rows, reader.bad)
                of_sources.append(len(writer) - before)
        rows.long.raise_if_fatal()
        rows.finish()
        counts = rows.counts
        counts.read, counts.bad, counts.samples = reader.read, reader.bad.count, len(writer)
        if not len(writer):
            raise _nothing_left(counts, key)
        return {"formats": reader.formats, "counts": asdict(counts), "of_sources": of_sources}


def _conversations(
    batch: list[Conversation], renderer: Renderer, encoder: Encoder, rows: _RowWriter, bad: Findings
) -> None:
    rendered: list[tuple[str, Rendered]] = []
    groups: list[int] = []
    for conversation, result in renderer.render(batch):
        if isinstance(result, str):
            bad.add(conversation.where, result)
            continue
        rows.counts.split += len(result) > 1
        rendered += [(conversation.where, sample) for sample in result]
        groups += [rows.new_group()] * len(result)
    if rendered:
        for (where, _), group, encoded in zip(rendered, groups, encoder.conversations(rendered), strict=True):
            rows.conversation(where, encoded, group=group)


class _RowWriter:
    """Makes tokenised samples fit into rows and writes them."""

    def __init__(self, writer: Writer, sequence_length: int, too_long: str) -> None:
        self.counts = Counts()
        headline = f"conversations are longer than data.sequence_length ({sequence_length})"
        self.long = Findings(headline, "raise it, or set data.too_long to truncate or drop")
        self._writer, self._room, self._too_long, self._groups = writer, sequence_length, too_long, 0
        self._lengths = array("L")  # of conversations, before any cut
        self._open: Tokens = np.zeros(0, dtype=np.uint32)  # end of a document whose next part follows

    def new_group(self) -> int:
        self._groups += 1
        return self._groups - 1

    def document(self, text: Text, tokens: Tokens) -> None:
        """Cut a document into pieces as long as a row; all its tokens are trained."""
        tokens = np.concatenate([self._open, tokens])
        end = len(tokens) if text.ends else len(tokens) // self._room * self._room
        for start in range(0, end, self._room):
            piece = tokens[start : min(start + self._room, end)]
            self._add(Encoded(piece, np.ones(len(piece), dtype=np.uint8)), self.new_group())
        self._open = tokens[end:]

    def conversation(self, where: str, encoded: Encoded, *, group: int) -> None:
        length, kept = len(encoded.tokens), 0
        self._lengths.append(length)
        if length > self._room and self._too_long == "error":
            self.long.add(where, f"{length} tokens")
        elif length > self._room and self._too_long == "drop":
            self.counts.too_long += 1
        else:
            cut = Encoded(encoded.tokens[: self._room], encoded.trained[: self._room])
            kept = len(cut.tokens) if self._add(cut, group) else 0
            self.counts.truncated += 0 < kept < length
        if length > self._room:
            self.counts.lost_tokens += length - kept

    def finish(self) -> None:
        """Find the length of a row that would have kept more of the conversations' tokens."""
        if not self.counts.lost_tokens:
            return
        lengths = np.sort(np.array(self._lengths, dtype=np.int64))
        longer = np.arange(len(lengths), 0, -1)  # how many are at least as long
        cut = self._too_long == "truncate"
        now = np.minimum(lengths, self._room) if cut else lengths[lengths <= self._room]
        lost = 1 - now.sum() / lengths.sum()
        share = next(one for one in KEPT_SHARES if one == 1.0 or 1 - one <= lost / 2)
        wanted, sums = share * lengths.sum(), np.cumsum(lengths)
        kept = sums - lengths + lengths * longer if cut else sums  # by rows as long as each
        first = int(np.searchsorted(kept, wanted))
        enough = (wanted - sums[first] + lengths[first]) / longer[first] if cut else lengths[first]
        self.counts.longer_row = -math.ceil(enough) // ROUND_LENGTH * -ROUND_LENGTH
        self.counts.longer_row_keeps = share

    def _add(self, encoded: Encoded, group: int) -> bool:
        """Write a sample; False where nothing of it would be trained."""
        trained = bool(encoded.trained[1:].any())
        if trained:
            self._writer.add(encoded.tokens, encoded.trained, group=group)
        else:
            self.counts.without_target += 1
        return trained


def _batches(samples: Iterable[Sample]) -> Iterator[list[Any]]:
    """Group samples of one kind that are tokenised together."""
    for _, group in groupby(samples, type):
        batch: list[Sample] = []
        chars = 0
        for sample in group:
            batch.append(sample)
            chars += len(sample.text) if isinstance(sample, Text) else 0
            if len(batch) == BATCH_SAMPLES or chars > BATCH_CHARS:
                yield batch
                batch, chars = [], 0
        if batch:
            yield batch


def _nothing_left(counts: Counts, key: str) -> DataError:
    what, fix = "no sample is left to train on", "look at the counts: the data is empty, or was filtered out"
    if counts.without_target:
        what = "no token of the data would be trained"
        fix = "raise data.sequence_length if the questions fill it, or set data.loss_on: all"
    what += f": {counts.read} read, {counts.bad} bad, {counts.too_long} too long"
    return DataError(f"{what}, {counts.without_target} without a trained token", where=key, fix=fix)


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that decides the tokens of a text."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # A tokenizer remembers the options of its last call; they do not hold for the calls made here.
        content["truncation"] = content["padding"] = None
    else:
        content = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    content["special"] = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _summary(
    job: Job, note: dict[str, Any], train: TokenDataset, held_out: TokenDataset | None
) -> dict[str, Any]:
    """Counts and sizes, without counts of zero; `fill` is the share of packed rows that is not padding."""
    counts = {name: count for name, count in note["counts"].items() if count or name == "read"}
    summary = {"format": " and ".join(note["formats"]), **counts, "train_samples": len(train)}
    if held_out is not None:
        summary |= {"eval_samples": len(held_out), "eval_target_tokens": _total(held_out.targets)}
    weights = 1.0 if train.weights is None else train.weights
    summary |= {"tokens": _total(train.lengths * weights), "target_tokens": _total(train.targets * weights)}
    summary["longest_tokens"] = int(train.lengths.max())
    # Attention costs the sum of squares: a token's own document, on average
    squares = float((np.square(train.lengths, dtype=np.float64) * weights).sum())
    summary["document_tokens"] = max(1, round(squares / summary["tokens"]))
    if job.data.packing:
        length, seed = job.data.sequence_length, job.train.seed
        rows = rows_of_epoch(
            train.lengths, sequence_length=length, seed=seed, epoch=0, packing=True, weights=train.weights
        )
        summary["fill"] = round(_total(train.lengths[rows.order]) / (len(rows) * length), 4)
    return summary


def _drawn(job: Job, train: TokenDataset, sets: npt.NDArray[np.int64]) -> list[tuple[str, int]]:
    """How many samples of each entry of `data.train` the first epoch takes; `sets`: the entry of each."""
    names = [job.data.train] if isinstance(job.data.train, str) else job.data.train
    assert train.weights is not None
    order = taken(train.weights, job.train.seed, 0)
    return list(zip(names, np.bincount(sets[order], minlength=len(names)).tolist(), strict=True))


def _total(column: npt.NDArray[Any]) -> int:
    return round(column.sum(dtype=np.float64 if column.dtype.kind == "f" else np.int64))


def _show(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> RenderedSample:
    tokens, trained = dataset.sample(0)
    marked = zip(tokens[:SHOWN_TOKENS].tolist(), trained.tolist(), strict=False)
    runs: list[tuple[str, bool]] = []
    for is_trained, run in groupby(marked, key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        runs.append((text.strip("\ufffd"), is_trained))  # bytes of a character that the end cuts
    return RenderedSample(runs, len(tokens))
