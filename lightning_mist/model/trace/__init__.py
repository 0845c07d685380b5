"""A step counted operator by operator: the ledger of its storages, and layers' costs from it."""

from lightning_mist.model.trace.counted_step import (
    Kinds,
    cost_keys,
    count_step,
    group,
    isolated_subject,
    module_key,
    step_bytes,
)
from lightning_mist.model.trace.optimizer import describe_optimizer, optimizer_class, optimizer_to_describe
from lightning_mist.model.trace.part_hooks import Walk, echo, imitate, loss_of, record_answer
from lightning_mist.model.trace.tracing import trace_model
