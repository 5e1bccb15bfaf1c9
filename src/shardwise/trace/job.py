"""A job's model as it is planned: its traces, and what decides which strategies it allows."""

from dataclasses import replace
from functools import cache

from shardwise.engines.facts import Architecture
from shardwise.job.schema import Job
from shardwise.kernels.flash4 import installed
from shardwise.kernels.target import HOPPER, Target
from shardwise.models.build import check_length
from shardwise.models.families import attention_of
from shardwise.models.tokenizer import expected_rows
from shardwise.objective import objective_of
from shardwise.simulate.step_trace import Op, StepTrace
from shardwise.simulate.time.roofline import MULTIPROCESSORS
from shardwise.trace.trace import Tracer

PACKED_ROWS, UNPACKED_ROWS = "_varlen_attn", "_varlen_as_cudnn_attn"
"""Names of the kernel for packed rows, and of one as fast as cuDNN's for unpacked rows."""
CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH4 = "flash4_attention"


class JobTracer:
    """Traces a job's model, each variant once.

    Attributes:
        architecture: what the rules ask about the model.
        assumed: for people: what was not known of the job.
        total, trainable: numbers of parameters.
    """

    def __init__(
        self,
        job: Job,
        *,
        vocab_size: int | None,
        capability: tuple[int, int],
        document_tokens: int | None = None,
        flash4: bool | None = False,
    ) -> None:
        """`vocab_size`: rows of the embedding; None: as the job says. `capability`: the GPU's.

        `document_tokens`: length of the documents in packed rows; None: each row is one. `flash4`: flash
        attention 4 is installed, which packed rows take on Hopper; None: if it is here.
        """
        objective = objective_of(job)
        self.assumed: tuple[str, ...] = ()
        if vocab_size is None:
            vocab_size = expected_rows(job.model)
            if vocab_size is not None and job.model.tokenizer == "train":
                self.assumed = (f"a vocabulary of {vocab_size}, fewer if the text has fewer",)
        tracer = Tracer(
            # Only the shape of a published model is needed, which the catalog may know without a network.
            job.model.model_copy(update={"weights": "random"}),
            precision=job.train.precision,
            sequence_length=job.data.sequence_length,
            vocab_size=vocab_size,
            objective=objective,
            target=Target(
                capability=capability,
                multiprocessors=MULTIPROCESSORS,
                flash4=(installed() if flash4 is None else flash4)
                and capability[0] == HOPPER.capability[0]
                and not job.train.deterministic,
            ),
        )
        check_length(tracer.built, job.data.sequence_length)
        self.total, self.trainable = tracer.built.total, tracer.built.trainable
        self.notes = tracer.built.notes
        self.architecture = Architecture.of(tracer.built.config)
        self._tracer, self._documents = tracer, document_tokens if job.data.packing else None
        self.trace = cache(self._trace)

    def _trace(self, rows: int, checkpoint_every: int, tensor_parallel: int) -> StepTrace:
        """Trace one micro-batch.

        Real rows hold one sample or several (packed). A micro-batch with both needs the most memory: the
        outputs of two kernels, and their concatenation. How many rows are packed is not known, and one in
        each micro-batch would bias the speed by its size: the packed row is timed as the others.
        """
        packing = attention_of(self._tracer.built.config).packing
        trace = self._tracer.trace(
            rows=rows,
            checkpoint_every=checkpoint_every,
            tensor_parallel=tensor_parallel,
            single_segment_rows=rows - 1 if packing == "mask" else max(1, rows - 1),
        )
        if self._documents is not None and packing == "varlen":
            return replace(trace, ops=tuple(_in_documents(op, self._documents) for op in trace.ops))
        if not any("cudnn" in op.name for op in trace.ops):
            return trace
        ops = (replace(op, name=op.name.replace(PACKED_ROWS, UNPACKED_ROWS)) for op in trace.ops)
        return replace(trace, ops=tuple(ops))


def _in_documents(op: Op, tokens: int) -> Op:
    """The packed kernel's work in rows of documents of `tokens` tokens: (tokens + 1) / 2 keys a query."""
    if op.kind != "attention" or not op.name.startswith((PACKED_ROWS, CUDNN, FLASH4)):
        return op
    *before, keys, size = op.shape
    name = op.name.replace(CUDNN, PACKED_ROWS)
    if tokens >= keys:  # or the window is shorter
        return replace(op, name=name)
    flops = op.flops * (tokens + 1) / (keys + 1)
    return replace(op, name=name, flops=flops, shape=(*before, tokens, size))
