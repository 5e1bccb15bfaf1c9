deepspeed --num_nodes=2 --num_gpus=4 \
  --master_addr=192.168.1.1 --master_port=29500 \
  --node_rank=0 train.py --deepspeed ds_config_zero2.json
