"""An objective small enough to check by hand, for tests of engines and of the tracer's seam."""

import torch
from torch import nn

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.objective import Objective


class FakeObjective(Objective):
    """Squared error of a linear score of each token against its label; ignored labels count nothing.

    With e the embedding of the token and w a vector, the loss of a target is (w e - label)^2.
    """

    def __init__(self, vocabulary: int = 8, width: int = 4) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, 1, bias=False))

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        scores = self.model(batch.input_ids).squeeze(-1).float()
        error = (scores - batch.labels) ** 2
        return error.masked_fill(batch.labels == IGNORED, 0.0).sum()
