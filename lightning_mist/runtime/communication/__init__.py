"""How tensors get from rank to rank, and how one failing rank ends all."""

from lightning_mist.runtime.communication.failure import FailureWatcher, begin_anew, start_watcher
from lightning_mist.runtime.communication.transport import (
    Crossing,
    DistributedTransport,
    GraphEnd,
    Microbatch,
    Neighbours,
    Portion,
    TensorWork,
    Transport,
    Work,
    complete,
)
