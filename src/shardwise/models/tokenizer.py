"""The tokenizer of a job: the model's own, another one, or one learned from the data."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwise.errors import JobError, MachineError
from shardwise.folders import cache_root
from shardwise.job.schema import Model
from shardwise.models.catalog import lookup, no_tokenizer
from shardwise.models.source import TOKENIZER_FILES, download

END = "<|endoftext|>"
PAD = "<|pad|>"
CORPUS_CHARACTERS = 500_000_000
"""A vocabulary is learned from at most this much text: more changes it little and takes memory."""
VOCABULARY_MULTIPLE = 64
"""Rows of a new embedding are rounded up to a multiple of this, as tensor cores need it."""

_FORMAT = 1
"""Part of every cache key; raised when training changes."""

Corpus = Callable[[], Iterator[str]]
"""Returns the training data's texts, from the start."""


def load_tokenizer(model: Model, *, corpus: Corpus, cache: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a job. It has a padding token, and no more tokens than it came with.

    `corpus`, `cache`: for `tokenizer: train`. Raises JobError where there is no tokenizer, MachineError
    where it must be downloaded and the hub cannot be reached, or the cache cannot be written.
    """
    if model.tokenizer == "train":
        root = (cache or cache_root()) / "tokenizers"
        return _from_folder(_trained(root, corpus, model.tokenizer_vocab), model)
    tokenizer = _from_folder(tokenizer_folder(model), model)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        # padding is neither attended to nor trained, so no new token, and no new embedding row, is needed
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def rows_for(model: Model, tokens: int) -> int | None:
    """Embedding rows for a tokenizer of `tokens` tokens; None keeps the shape's, as trained weights must."""
    if model.weights != "random" or model.tokenizer is None:
        return None
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def expected_rows(model: Model) -> int | None:
    """`rows_for` before data are read: one to be learned counts its largest size. Raises as loading does."""
    if model.weights != "random" or model.tokenizer is None:
        return None
    if model.tokenizer == "train":
        return rows_for(model, model.tokenizer_vocab)
    return rows_for(model, len(load_tokenizer(model, corpus=lambda: iter(()))))


def train_bpe(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Learn byte-level BPE of at most `vocabulary` tokens, special ones and all 256 bytes included."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    start: dict[str, Any] = {"special_tokens": [END, PAD], "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=vocabulary, show_progress=False, **start))
    return tokenizer


def tokenizer_folder(model: Model) -> Path:
    """The folder that holds the tokenizer's files, downloaded where necessary."""
    name = model.tokenizer or model.source
    if Path(name).is_dir():
        return Path(name)
    if error := no_tokenizer(model):
        raise error
    key, shape = "model.tokenizer" if model.tokenizer else "model.source", lookup(name)
    repository = shape.hub if shape and "/" not in name and shape.hub else name
    files = ["config.json", *TOKENIZER_FILES, *(["*.py"] if model.trust_remote_code else [])]
    revision = None if model.tokenizer else model.revision
    train = ", or set model.tokenizer: train" if model.weights == "random" else ""
    fix = f"download it once where there is a network and name the folder{train}"
    return download(repository, files, revision=revision, where=key, offline_fix=fix)


def _from_folder(folder: Path, model: Model) -> PreTrainedTokenizerBase:
    if error := no_tokenizer(model, folder):
        raise error
    try:
        return from_files(folder, trusted=model.trust_remote_code)
    except Exception as error:  # noqa: BLE001  (the tokenizers library raises plain Exception)
        what = f"the tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}"
        fix = "restore its files, or name another one in model.tokenizer"
        raise JobError(what, where=str(folder), fix=fix) from None


def from_files(folder: Path, *, trusted: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Next to a Qwen2 config and a few others, AutoTokenizer takes the class of the model, which splits text in
    its own way, also where the files say that they are complete by themselves (`TokenizersBackend`).
    """
    kind = PreTrainedTokenizerFast if _complete(folder) else AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)  # type: ignore[no-any-return]


def misread_as(folder: Path) -> str:
    """The class as which AutoTokenizer reads a folder's tokenizer otherwise than it was saved; else empty."""
    if not _complete(folder):
        return ""
    mine = from_files(folder).backend_tokenizer.to_str()  # type: ignore[attr-defined]
    try:
        other = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError):  # it would need the model's own code, which is not run here
        return ""
    backend = getattr(other, "backend_tokenizer", None)
    return "" if backend is not None and backend.to_str() == mine else type(other).__name__


def _complete(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    kept = config.is_file() and (folder / "tokenizer.json").is_file()
    return kept and json.loads(config.read_bytes()).get("tokenizer_class") == "TokenizersBackend"


def _trained(root: Path, corpus: Corpus, vocabulary: int) -> Path:
    """The cache's folder with the tokenizer of this text; one process learns it, others wait."""
    entry = root / _key(corpus(), vocabulary)
    if entry.is_dir():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with entry.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not entry.is_dir():
                learned = train_bpe(_limited(corpus()), vocabulary)
                form = {"eos_token": END, "pad_token": PAD, "clean_up_tokenization_spaces": False}
                tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, **form)
                partial = entry.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                tokenizer.save_pretrained(partial)
                partial.rename(entry)
    except OSError as error:
        what = f"the tokenizer cannot be saved: {error.strerror or error}"
        fix = "make room or give permission, or set SHARDWISE_CACHE to another folder"
        raise MachineError(what, where=str(root), fix=fix) from None
    return entry


def _key(texts: Iterator[str], vocabulary: int) -> str:
    digest = hashlib.blake2b(f"{_FORMAT}/{vocabulary}".encode(), digest_size=16)
    for text in _limited(texts):
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\xff")  # in no UTF-8 text
    return digest.hexdigest()


def _limited(texts: Iterator[str]) -> Iterator[str]:
    room = CORPUS_CHARACTERS
    for text in texts:
        room -= len(text)
        if room < 0:
            return
        yield text
