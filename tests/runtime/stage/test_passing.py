import pytest
import torch

from lightning_mist.runtime.stage.pipeline_stage import InputSpec, StageOutput
from tests.runtime.stage.test_pipeline_stage import Pipeline, calls


@pytest.mark.parametrize("name", ["nano", "skips"])
def test_what_a_stage_hands_on_is_what_the_next_one_expects(name):
    pipeline = Pipeline(name, 3)
    announced = []
    for stage, call in zip(pipeline.stages, calls(pipeline.modules, pipeline.batch), strict=True):
        with stage.attached():
            announced.append(stage.input_specs(call, None))
    outputs = [output for _, output in pipeline.forward(pipeline.batch)]
    for output, specs in zip(outputs, announced[1:], strict=False):
        assert specs == tuple(
            InputSpec(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                device=torch.device("cpu"),
                requires_grad=tensor.requires_grad,
                length=length,
            )
            for tensor, length in zip(output.tensors, output.lengths, strict=True)
        )
        assert output.value is None
    assert announced[0] == ()
    # The last one has nothing to send, only the loss.
    assert outputs[-1] == StageOutput(tensors=(), value=outputs[-1].value)
    assert outputs[-1].value.ndim == 0
