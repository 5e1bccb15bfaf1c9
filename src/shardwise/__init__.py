"""shardwise: plan, run and measure the training of language models on DeepSpeed and FSDP2."""

__version__ = "0.1.0"
