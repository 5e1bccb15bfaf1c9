"""Lets the tests here run whole jobs with the helpers of tests/distributed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
