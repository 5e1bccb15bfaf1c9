import deepspeed
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype=torch.bfloat16)
engine, *_ = deepspeed.initialize(model=model, config="zero1-without-bf16.json")
