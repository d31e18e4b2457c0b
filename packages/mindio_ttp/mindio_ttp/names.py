"""The numbers that handlers and reports are told by. Their names are MindIO TTP's."""

from enum import IntEnum


class OptimizerType(IntEnum):
    """What a replica group holds: its place in `replica_info`."""

    ATTENTION = 0
    MOE = 1


class Action(IntEnum):
    """What `tft_wait_next_action` answers."""

    RETRY = 0
    EXIT = 1


class ReportState(IntEnum):
    """What a process says of itself, see `mindio_ttp.reports`."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(IntEnum):
    """What the repair handler is to do, as `repair_info["repair_type"]`."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6
