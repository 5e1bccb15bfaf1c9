"""From a job's `model` section to a model, and back to files."""

import logging

# Where a processor has AVX-512, importing it (peft does) advises a package for inference on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
