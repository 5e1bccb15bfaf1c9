from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(
    "EleutherAI/gpt-neo-2.7B",
    load_in_8bit=True,
    device_map="auto",
)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    bf16=True,
    deepspeed="stage2-offload-param.json",
)
Trainer(model=model, args=arguments).train()
