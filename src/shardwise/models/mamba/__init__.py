"""Mamba-1 for training: transformers' modules and names, our arithmetic, the authors' initialisation."""

from shardwise.models.mamba.prepare import check_config, mixer_flops_per_token, prepare

__all__ = ["check_config", "mixer_flops_per_token", "prepare"]
