"""Make the inputs without a hub: the text, a tokenizer trained on it, a model's shape, its weights.

python make_assets.py --shape llama-3.1-8b --out assets/8b TEXT...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

SHAPES = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama-2-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "llama-1.1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "1b_mamba": {
        "model_type": "mamba",
        "vocab_size": 50257,
        "hidden_size": 2048,
        "num_hidden_layers": 34,
    },
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
END = "<|end_of_text|>"


def read(path: Path) -> Iterator[str]:
    """Documents of a jsonl ({"text"}), alpaca json or wikitext file (articles start at ` = Title = `)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        yield from (json.loads(line)["text"] for line in text.split("\n") if line.strip())
    elif path.suffix == ".json":
        for sample in json.loads(text):
            yield "\n".join(sample[key] for key in ("instruction", "input", "output") if sample.get(key))
    else:
        article: list[str] = []
        for line in text.splitlines():
            if line.startswith(" = ") and not line.startswith(" = =") and article:
                yield "\n".join(article)
                article = []
            article.append(line)
        yield "\n".join(article)


def save_weights(config: PretrainedConfig, folder: Path) -> None:
    """In bf16, for the programs that train nothing but a saved model."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", action="store_true", help="save random weights too, made on the GPU")
    arguments = parser.parse_args()
    model = arguments.out / "model"
    model.mkdir(parents=True, exist_ok=True)

    texts = [text for path in arguments.text for text in read(path) if text.strip()]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (arguments.out / "text.jsonl").write_text(lines, encoding="utf-8")

    shape = SHAPES[arguments.shape]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=min(shape["vocab_size"], 32000), special_tokens=[END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(model)
    end = tokenizer.eos_token_id
    own = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    mamba = "model_type" in shape  # and its defaults
    config = AutoConfig.for_model(**({} if mamba else own), **shape, bos_token_id=end, eos_token_id=end)
    config.architectures = ["MambaForCausalLM" if mamba else "LlamaForCausalLM"]
    config.save_pretrained(model)
    if arguments.weights:
        save_weights(config, model)
    print(f"{len(texts)} documents, {len(tokenizer)} tokens in the vocabulary, in {arguments.out}")


if __name__ == "__main__":
    main()
