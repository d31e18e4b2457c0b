"""What tests of the decorated function enter it with."""

from mindio_ttp import framework_ttp as ttp

# how each handler of a recovery is registered, in the order in which they are called
REGISTER = {
    "stop": ttp.tft_register_stop_handler,
    "clean": ttp.tft_register_clean_handler,
    "rebuild": ttp.tft_register_rebuild_group_handler,
    "repair": ttp.tft_register_repair_handler,
    "rollback": ttp.tft_register_rollback_handler,
}


def start(rank=0, world=1, *, enable_uce=True):
    ttp.tft_init_processor(rank, world, False, False, enable_uce=enable_uce)
    ttp.tft_start_processor("127.0.0.1", 8000)
    group = {"rank_list": list(range(world)), "replica_cnt": world, "replica_shift": 0}
    ttp.tft_set_optimizer_replica(rank, [group])


def steps(*numbers, then=None):
    """A training function that does these steps."""

    def train(args):
        for number in numbers:
            ttp.tft_start_updating_os()
            ttp.tft_end_updating_os(number)
        if then is not None:
            raise then
        return args

    return train


def enter(job, training):
    """One entry. Returns what it returned or raised, and what the process holds then."""
    raised = []

    def function():
        try:
            return training.enter()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)
            return None

    result, report = job.enter(function)
    return (raised or [result])[0], report


def fail(*_, **__):
    raise OSError("the device does not answer")
