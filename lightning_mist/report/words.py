"""What the words of a report mean, for who meets them there for the first time."""

from collections.abc import Iterator

from lightning_mist.plan import Plan, ZeroStage


def words_for(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The words that a plan needs, each with what it means."""
    return tuple(_words(plan))


def _words(plan: Plan) -> Iterator[tuple[str, str]]:
    stages = plan.stages
    yield "row", "one sample of a batch; of language models one sequence of tokens"
    yield "microbatch", "a part of a batch that goes through the network at once; gradients of all parts are added up"
    if plan.num_stages > 1:
        yield "stage", "a run of neighbouring layers, and the group of devices that computes them"
        yield "schedule", _SCHEDULES[plan.schedule]
        yield "bubble", "time in which devices wait for other stages, while the pipeline fills, drains, or is uneven"
    if any(stage.data_parallel_degree > 1 for stage in stages):
        yield "data parallel", "so many copies of a stage work on different rows and average their gradients"
    if any(stage.mesh.tensor_parallel_degree > 1 for stage in stages):
        yield "tensor parallel", "so many devices share every layer's matrices and exchange results within each layer"
    if any(stage.mesh.sequence_parallel for stage in stages):
        yield "sequence parallel", "these devices also share what lies between matrices, along the sequence"
    if any(stage.mesh.context_parallel_degree > 1 for stage in stages):
        yield "context parallel", "so many devices share the tokens of each row"
    if any(stage.zero_stage > ZeroStage.NONE for stage in stages):
        yield (
            "ZeRO",
            "copies of a stage share out what else each would hold whole: 1 optimizer state, 2 gradients too, "
            "3 parameters too",
        )
    if any(stage.checkpointing.layers for stage in stages):
        yield "checkpointed", "layers whose activations are not kept but computed again in backward (recompute)"
    if any(stage.offload.any for stage in stages):
        yield "offload", "the share of parameters, gradients, optimizer state or activations that lives in host memory"
    yield "closed form", "the formula of a step's seconds that the search minimises, and what its proof is about"
    yield "clock", "runs the plan's schedule action by action; predicted steps are the clock's"
    yield (
        "working set",
        "what is there only while a microbatch is computed: its own activations, and what layers need meanwhile",
    )


_SCHEDULES = {
    "1f1b": "1F1B: once the pipeline is full every stage alternates one forward and one backward",
    "gpipe": "GPipe: all forwards of a batch, then all backwards",
    "interleaved-1f1b": "interleaved 1F1B: devices hold several runs of layers, so that the pipeline fills sooner",
    "zb-h1": "ZB-H1: gradients of weights are computed apart from those of inputs, and fill waiting time",
}
