"""Kernels beside their peers and the device's ceilings; `python -m bench.kernels` runs them, groups.py lists what there is to run.

    rows.py      what a timed call is, and the arithmetic of its line         (pure)
    operands.py  ragged pages and dense twins of the same values
    timing.py    device time of a call, and the ceilings measured in the same run
    running.py   measures a group's items and records what failed or was left out
    workers.py   shares a run's items among processes
    turns.py     one process at a time on the GPU
    attention.py, mixed.py, dense.py, memory.py, pages.py, int4.py            groups of rows, listed in groups.py
    int4_sweep.py                                                             tries tiles of int4_matmul; a program of its own
    jax_peers.py, torch_peers.py                                              other people's kernels
    plot.py      a picture of one result file                                 (pure)
"""
