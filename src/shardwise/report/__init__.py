"""What runs say, for people and for programs."""
