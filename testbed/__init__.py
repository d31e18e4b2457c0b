"""Real jobs on this machine, for tests and benchmarks: manager, torchrun, workers.

    proc        what lives on the machine
    processes   one process with its output; environments, ports, torchrun's command
    warm        the parent from which processes are forked that would have to import torch
    hosts       hosts of its own, in network namespaces: killed, cut off, slow, lossy, healed
    cable       the bad cable of one of them
    job         a job: starts its processes, reads what they left behind
    facts       what training scripts have noted, read again
    script      for training scripts: facts that they note, faults that they are to suffer
    sharded     for training scripts: a small model, sharded in one of many ways

Not a part of the package that is installed.
"""
