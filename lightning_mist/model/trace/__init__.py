"""A step counted operator by operator: the ledger of its storages, and layers' costs from it."""

from lightning_mist.model.trace.block_kinds import Kinds, cost_keys, group, module_key
from lightning_mist.model.trace.counted_step import count_step, isolated_subject, step_bytes
from lightning_mist.model.trace.optimizer import describe_optimizer, optimizer_class, optimizer_to_describe
from lightning_mist.model.trace.part_hooks import Walk, loss_of
from lightning_mist.model.trace.tracing import trace_model
from lightning_mist.model.trace.twins import Answer, echo, imitate, record_answer
