#!/bin/bash
export OMP_NUM_THREADS=8
deepspeed --num_gpus=4 \
    int8_lora.py \
    --deepspeed stage2-offload-param.json
