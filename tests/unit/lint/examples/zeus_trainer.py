from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import HFGlobalPowerLimitOptimizer

arguments = TrainingArguments(output_dir="out", bf16=True, deepspeed="zero2.json")
monitor = ZeusMonitor(gpu_indices=[0, 1, 2, 3])
tuner = HFGlobalPowerLimitOptimizer(monitor)
model = AutoModelForCausalLM.from_pretrained("EleutherAI/gpt-neo-2.7B")
Trainer(model=model, args=arguments, callbacks=[tuner]).train()
