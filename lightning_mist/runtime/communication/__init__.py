"""How tensors get from rank to rank, and how one failing rank ends all."""

from lightning_mist.runtime.communication.boundary import Crossing, GraphEnd, Microbatch, Neighbours, Portion
from lightning_mist.runtime.communication.failure import FailureWatcher, begin_anew, start_watcher
from lightning_mist.runtime.communication.transport import (
    DistributedTransport,
    TensorWork,
    Transport,
    Work,
    complete,
    told,
)
