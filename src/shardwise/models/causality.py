"""Whether a model's logits depend on later tokens, tried on a tiny copy where no row of the table knows.

Encoders attend both ways unless their config says otherwise. transformers builds them as causal language
models all the same, and they would be trained to read their targets from the input.
"""

from itertools import product
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError
from shardwise.models.families import FAMILIES, attention_for
from shardwise.models.structure import count_parameters, seeded

_DIRECTIONS = {"is_decoder": True, "causal": True, "use_bidirectional_attention": False}
"""What a config may say of the direction, and the value with which a model is causal."""
_MOST = 10_000_000
"""Parameters of a copy that takes well below a second."""
_LENGTH = 12
_SIZES: dict[int, str] = {
    64: "vocab_size shape_vocab_size pronunciation_vocab_size vocab_size_per_layer_input n_positions "
    "max_position_embeddings max_seq_len",
    48: "intermediate_size ffn_dim ffn_hidden_size n_inner decoder_ffn_dim encoder_ffn_dim d_inner dim_ff",
    32: "hidden_size n_embd d_model emb_dim embedding_size input_embedding_size output_embedding_size",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_state "
    "chunk_size mamba_chunk_size linear_head_dim",
    8: "head_dim d_head dim_head d_kv kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_local_experts num_experts n_routed_experts num_hidden_layers num_layers "
    "n_layer n_layers encoder_layers decoder_layers",
    2: "num_experts_per_tok num_experts_per_token moe_topk pad_token_id bos_token_id eos_token_id",
    1: "n_group topk_group num_expert_group",
}
_TINY = {name: size for size, names in _SIZES.items() for name in names.split()}
_FEW = {name: size for name, size in _TINY.items() if size == 64 or name.endswith(("_id", "_layers"))}


def check_causal(model: PreTrainedModel) -> None:
    """Raise JobError where a change of the last token would change earlier logits of `model`.

    transformers' families of the table are tested to be causal, unless their config asks for the other
    direction. Where no tiny copy can be built or run, the config alone decides.
    """
    config = model.config.get_text_config()
    given = {name: getattr(config, name, causal) for name, causal in _DIRECTIONS.items()}
    # Gemma's "vision" is about the tokens of an image
    wrong = [name for name, causal in _DIRECTIONS.items() if (given[name] in (True, "all")) is not causal]
    kind, own = model.config.model_type, type(model).__module__.startswith("transformers.")
    if own and kind in FAMILIES and "use_bidirectional_attention" not in wrong:
        return
    # in fp64 roundings are no change, but not all code computes in it
    ways = product((_TINY, _FEW, {}), (torch.float64, torch.float32))
    tried = (_looks_ahead(model, sizes, dtype) for sizes, dtype in ways)
    ahead = next((answer for answer in tried if answer is not None), None)
    if ahead is None:  # an encoder-decoder's config is the encoder's, and its decoder is one
        ahead = bool(wrong) and not config.is_encoder_decoder
    if ahead:
        what = f"{kind!r} models read later tokens, too: each target would be in its input"
        values = " and ".join(f"{name}: {str(_DIRECTIONS[name]).lower()}" for name in wrong)
        fix = f"set {values} in its config, or use a decoder" if wrong else "use a decoder-only model"
        raise JobError(what, where="model.source", fix=fix)


@torch.no_grad()
def _looks_ahead(model: PreTrainedModel, sizes: dict[str, int], dtype: torch.dtype) -> bool | None:
    """Whether the last token changes earlier logits of a copy; None where that cannot be tried."""
    values = model.config.to_dict()

    def build() -> PreTrainedModel:
        config: PretrainedConfig = type(model.config).from_dict(_shrunk(values, sizes))
        how = {"dtype": dtype, "experts_implementation": "eager"}  # grouped products have no fp64
        return type(model)._from_config(config, attn_implementation=attention_for(config), **how)

    try:
        with torch.device("meta"):
            if count_parameters(build()) > _MOST:
                return None
        with seeded(torch.device("cpu")) as seed:
            seed(0, "causality")
            copy = build().eval()
            for parameter in copy.parameters():  # weights that matter, and gates that begin at zero open
                parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() > 1 else 0.05)
        tokens = torch.arange(3, 3 + _LENGTH)[None]
        changed = torch.cat((tokens[:, :-1], tokens[:, :1]), dim=1)
        first, second = (copy(input_ids=ids, use_cache=False).logits[0] for ids in (tokens, changed))
        changes = (first - second).abs().amax(dim=1) / first.abs().max()
    except Exception:  # noqa: BLE001 - code of any architecture, with sizes it was not written for
        return None
    if len(changes) != _LENGTH or not changes.isfinite().all() or changes[-1] < 1e5 * torch.finfo(dtype).eps:
        return None
    return bool(changes[:-1].max() > 1e-3 * changes[-1])


def _shrunk(values: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """A config's values, its parts' too, of at most these `sizes`; what is about further layers is cut."""
    layers, shrunk = values.get("num_hidden_layers"), dict[str, Any]()
    left = sizes.get("num_hidden_layers", layers or 0)
    for name, value in values.items():
        if isinstance(value, dict):
            by_layer = name == "per_layer_config"
            kept = {key: one for key, one in value.items() if not by_layer or int(key) < left}
            shrunk[name] = _shrunk(kept, sizes)
        elif isinstance(value, list) and len(value) == layers:
            shrunk[name] = value[:left]
        else:
            shrunk[name] = min(value, sizes[name]) if isinstance(value, int) and name in sizes else value
    return shrunk
