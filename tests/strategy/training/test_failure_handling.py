import gc
import os
import select
import signal

import torch.distributed as dist

from lightning_mist.strategy.training.failure_handling import watched


def leave_a_group_as_garbage(path):
    """As trainers do that have fitted: its threads run until the garbage collector finds it."""
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()


def test_a_forked_launch_leaves_the_garbage_of_earlier_fits_alone(tmp_path):
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    reading, writing = os.pipe()
    try:
        leave_a_group_as_garbage(tmp_path)
        launcher = os.getpid()
        child = os.fork()
        if child == 0:
            watched(None, launcher, gc.collect)
            os.write(writing, b"done")
            os._exit(0)
        readable, _, _ = select.select([reading], [], [], 60)
        if not readable:
            os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == 0
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.collect()
        (gc.enable if was_enabled else gc.disable)()
        os.close(reading)
        os.close(writing)
