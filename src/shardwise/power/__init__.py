"""GPU power limits: choosing one while training, setting it, and putting back what was there."""
