from transformers import TrainingArguments

arguments = TrainingArguments(output_dir="out", bf16=True, deepspeed="comments.json")
