"""Training inputs of the rows, made without network: tokenizer, a text of full rows, the shapes' configs.

The time of attention depends on where documents end. So the text is one document, cut to a multiple of 8192
tokens: at every sequence length, each row is one full segment without padding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rows import Row

LONGEST = 8192
ROWS = 24
"""Rows of the longest length in the text; it is read again from the start where a run needs more."""
VOCABULARY = 8192
"""Tokens of the tokenizer, at most; the model keeps its published vocabulary, whose other rows are unused."""


@dataclass(frozen=True)
class Assets:
    """Files for rows, made when first requested."""

    folder: Path
    texts: Sequence[Path]
    """Real text (txt, or jsonl with `text`); without any, the package's sample."""

    def text(self, row: Row) -> Path:
        return self._tokenizer(row) / "text.txt"

    def source(self, row: Row) -> Path:
        """A folder that `model.source` can name: the published shape with our tokenizer."""
        folder = self.folder / "models" / row.model
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            for file in self._tokenizer(row).glob("tokenizer*"):
                shutil.copy(file, folder)
            (folder / "config.json").write_text(json.dumps(row.shape.hf_config(), indent=1))
        return folder

    def _tokenizer(self, row: Row) -> Path:
        size = min(VOCABULARY, int(row.shape.config.get("vocab_size", VOCABULARY)))
        folder = self.folder / f"tokenizer-{size}"
        if not (folder / "text.txt").exists():
            _make(folder, _read(self.texts), size)
        return folder


def _make(folder: Path, text: str, size: int) -> None:
    from transformers import PreTrainedTokenizerFast

    from shardwise.models.tokenizer import END, PAD, train_bpe

    room = ROWS * LONGEST * 8  # characters; a token has fewer than 8 on average
    bpe = train_bpe(iter([text[:room]]), size)
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD).save_pretrained(folder)
    text = (text * -(-room // len(text)))[:room]
    encoding = bpe.encode(text)
    for tokens in range(ROWS * LONGEST, 0, -LONGEST):
        # one less: the end-of-text token is added
        cut = text[: encoding.offsets[tokens - 1][0]]
        if len(bpe.encode(cut).ids) == tokens - 1:  # false if the cut goes through a word
            (folder / "text.txt").write_text(cut, encoding="utf-8", newline="")
            return
    raise SystemExit("the text cannot be cut into full rows; give another with --text")


def _read(paths: Sequence[Path]) -> str:
    if not paths:
        return (resources.files("shardwise.job") / "samples" / "training.txt").read_text(encoding="utf-8")
    parts = []
    for path in paths:
        content = path.read_text(encoding="utf-8")
        lines = content.split("\n") if path.suffix == ".jsonl" else []
        parts.append("\n\n".join(json.loads(line)["text"] for line in lines if line.strip()) or content)
    return "\n\n".join(parts)
