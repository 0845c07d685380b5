"""Directories of several ranks, written by one process."""

from lightning_mist.strategy.checkpoints.directory import DirectoryWriter, SavePlanner


def write_directory(path, states, meta):
    """Do what DCP does on all ranks of a world, for ranks that are here with what they write."""
    planners, writers, plans = [], [], []
    for rank, state in enumerate(states):
        planner, writer = SavePlanner(), DirectoryWriter(path, meta)
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        writers.append(writer)
    plans, metadata = planners[0].create_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, planner, plan in zip(writers, planners, writers[0].prepare_global_plan(plans), strict=True)
    ]
    writers[0].finish(metadata, results)
