deepspeed --profile train.py --deepspeed ds_config_zero2.json
