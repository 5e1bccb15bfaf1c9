"""Mamba's initialisation as in mamba_ssm 2.3 (`_init_weights` and `Mamba.__init__`), module by module.

transformers draws embeddings and the input projections at a standard deviation of 0.1, five to twelve times
the authors', and does not scale the output projections: its first loss is far above theirs.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers.models.mamba.modeling_mamba import MambaMixer, MambaRMSNorm

EMBEDDING_STD = 0.02


@torch.no_grad()
def initialise(module: nn.Module, *, layers: int) -> None:
    """Set the parameters that `module` itself holds; of a mixer also those below that depend on it.

    `layers`: of the model. Output projections are divided by its square root (Radford et al. 2019), as each
    layer has one residual addition.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, MambaRMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, nn.Conv1d):
        module.reset_parameters()
    elif isinstance(module, nn.Linear):
        if getattr(module.weight, "_is_hf_initialized", False):
            return  # the output head, tied to the embedding, which is set already
        # nn.Linear's own, without its bias
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, MambaMixer):
        module.init_mamba_weights()  # A_log, D, dt: transformers' are the authors'
        module.out_proj.weight.div_(math.sqrt(layers))
