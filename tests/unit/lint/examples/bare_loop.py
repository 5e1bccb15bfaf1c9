import deepspeed
from my_model import model

engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="auto.json")
