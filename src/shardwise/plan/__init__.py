"""Which strategy a job should run with: every one that is allowed, predicted, ranked and explained."""
