"""Starts the manager of a job on node 0:  python manager.py &  before torchrun. Ends with the job.

The job id is MINDX_TASK_ID, the port TASKD_PORT (9601). Exit code: 0 the job succeeded (or SIGTERM
ended the manager), 1 it failed, 2 the configuration is wrong or the port is taken.
"""

import argparse
import sys

from taskd.api import init_taskd_manager, start_taskd_manager


def main() -> int:
    """Options are promises that registrations are held against.

    Left out, the agents' registrations say it.
    """
    parser = argparse.ArgumentParser(description="The manager of a taskd job.")
    parser.add_argument("--nnodes", type=int, help="number of nodes (default: as the agents say)")
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        help="processes per node (default: as the agents say)",
    )
    options = parser.parse_args()
    config: dict[str, object] = {}
    if options.nnodes is not None:
        config["node_nums"] = options.nnodes
    if options.nproc_per_node is not None:
        config["proc_per_node"] = options.nproc_per_node
    if not init_taskd_manager(config):
        return 2
    return 0 if start_taskd_manager() else 1


if __name__ == "__main__":
    sys.exit(main())
