"""Measurements that claims rest on. Nobody types their numbers by hand.

Each benchmark is a module that runs from the repository's root and writes a record, a JSON file in ``records/``:

* ``python -m benchmarks.hardware.profile``: what this machine computes, moves and communicates;
* ``python -m benchmarks.accuracy.step_times``: the cost model against executed plans;
* ``python -m benchmarks.accuracy.memory_limits``: plans under ever lower limits, and whether training stays under them;
* ``python -m benchmarks.planner.tuning``: how long planning takes;
* ``python -m benchmarks.throughput.against_ddp``: a plain plan against Lightning's DDP, runs alternating;
* ``python -m benchmarks.report``: the records as tables, and the tables of the documentation.
"""
