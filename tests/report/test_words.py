from lightning_mist.plan import OffloadRatios
from lightning_mist.report.html_report import words_for
from tests.report.networks import predicted


def test_only_words_that_the_plan_needs():
    assert {"stage", "schedule", "bubble"} <= set(dict(words_for(predicted(2, 4))))
    assert not {"stage", "bubble", "ZeRO", "offload"} & set(dict(words_for(predicted(1, 4))))
    plan = predicted(2, 4, devices=4, zero_stage=1, checkpointed_layers=1, offload=OffloadRatios(optimizer=1.0))
    assert {"data parallel", "ZeRO", "checkpointed", "offload"} <= set(dict(words_for(plan)))
    assert dict(words_for(predicted(2, 4, schedule="zb-h1")))["schedule"].startswith("ZB-H1")
