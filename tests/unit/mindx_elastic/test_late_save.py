"""A dying gasp that another thread writes while the main thread goes on with its step.

MindSpore is a fake here, of the few names that are used; tests/mindspore shows it with a real one.
"""

import json
import pathlib
import signal
import sys
import threading
import types

import pytest

from mindx_elastic import record
from mindx_elastic.progress import Progress
from mindx_elastic.terminating_message import ExceptionCheckpoint


class Counter:
    """The optimizer's `global_step`."""

    def __init__(self) -> None:
        self.value = 0
        self.at_read = lambda: None

    def asnumpy(self):
        self.at_read()
        return self

    def ravel(self):
        return [self.value]


class Parameters(dict):
    """MindSpore's cb_params of a training whose only weight is the number of its steps."""

    def __init__(self) -> None:
        self.counter = Counter()
        network = types.SimpleNamespace(weight=0, get_parameters=list)
        super().__init__(
            train_network=network,
            optimizer=types.SimpleNamespace(global_step=self.counter),
            cur_step_num=0,
            cur_epoch_num=1,
            batch_num=100,
            net_outputs=None,
            parallel_mode="stand_alone",
        )

    def __getattr__(self, name: str) -> object:
        return self[name]

    def original_args(self):
        return self

    def optimize(self) -> None:
        """The end of what the network does in a step."""
        self.counter.value += 1
        self["train_network"].weight += 1

    def come_out(self) -> None:
        """The network has returned."""
        self["net_outputs"] = object()


class ModelCheckpoint:
    def __init__(self, _prefix, _directory, config) -> None:
        self._config = config


class Training:
    """What MindSpore's loop does with the call-back, and what it does to a file that is saved."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.parameters = Parameters()
        self.saving: list = []  # what happens within each save, before the weight is written
        config = types.SimpleNamespace(
            exception_save=False, append_dict=None, saved_network=None, enc_key=None,
            enc_mode="AES-GCM", crc_check=False,
        )  # fmt: skip
        self.callback = ExceptionCheckpoint("net", str(folder), config)
        self.folder = folder
        self.callback.on_train_begin(self.parameters)

    def begin_step(self) -> None:
        self.parameters["cur_step_num"] += 1
        self.callback.on_train_step_begin(self.parameters)

    def end_step(self) -> None:
        self.callback.on_train_step_end(self.parameters)

    def step(self) -> None:
        self.begin_step()
        self.parameters.optimize()
        self.parameters.come_out()
        self.end_step()

    def save_checkpoint(self, network, name, **_options) -> None:
        if self.saving:
            self.saving.pop(0)()
        pathlib.Path(name).write_text(json.dumps(network.weight))

    def saved(self) -> dict[str, int]:
        return saved_in(self.folder)

    def record(self) -> record.Record:
        return record.read(str(self.folder / "state" / "job" / "rank_0.json"))


def saved_in(folder: pathlib.Path) -> dict[str, int]:
    """Weight by name of each breakpoint file."""
    return {one.name: json.loads(one.read_text()) for one in folder.glob("*_breakpoint.ckpt")}


@pytest.fixture
def ended(tmp_path):
    """What was saved each time when SIGTERM would have ended the process."""
    found: list[dict[str, int]] = []
    former = signal.signal(signal.SIGTERM, lambda *_: found.append(saved_in(tmp_path)))
    yield found
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def training(tmp_path, monkeypatch, ended):
    for name in ("RANK_ID", "RANK", "RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM", "MINDX_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINDX_ELASTIC_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("MINDX_FAULT_NPUS", str(tmp_path / "fault-npus"))
    callbacks = types.ModuleType("mindspore.train.callback")
    callbacks.ModelCheckpoint = ModelCheckpoint
    serialization = types.ModuleType("mindspore.train.serialization")
    for module in (
        types.ModuleType("mindspore"), types.ModuleType("mindspore.train"), callbacks, serialization
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("mindx_elastic.terminating_message._classes", {})
    found = Training(tmp_path)
    serialization.save_checkpoint = found.save_checkpoint
    yield found
    if found.callback._termination is not None:
        found.callback._termination.disarm()


def test_a_step_that_ends_while_the_one_before_it_is_written_is_saved_in_its_place(
    training, ended
) -> None:
    for _ in range(7):
        training.step()
    training.begin_step()

    def go_on() -> None:
        training.parameters.optimize()
        training.parameters.come_out()
        training.end_step()  # nobody has asked the main thread to save, so that it returns

    training.saving = [go_on]
    training.callback._save_late()
    assert training.saved() == {"net-1_8_breakpoint.ckpt": 8}
    record.check_files(training.record())
    assert training.record().step == 8
    assert ended == []  # no SIGTERM has come


def test_the_process_is_not_ended_before_the_step_that_the_main_thread_has_ended_is_saved(
    training, ended, monkeypatch
) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_STEP_WAIT_S", "0")
    for _ in range(3):
        training.step()
    training.begin_step()
    is_saving, has_ended = threading.Event(), threading.Event()

    def go_on() -> None:
        is_saving.set()
        assert has_ended.wait(30)

    training.saving = [go_on]
    signal.raise_signal(signal.SIGTERM)
    assert is_saving.wait(30)
    training.parameters.optimize()
    training.parameters.come_out()
    progress = training.callback._progress
    former = progress.end_step

    def end_step() -> None:
        former()
        has_ended.set()  # before the main thread waits for the other one

    monkeypatch.setattr(progress, "end_step", end_step)
    training.end_step()
    training.callback._termination.disarm()  # waits for the other thread
    assert ended == [{"net-1_4_breakpoint.ckpt": 4}]


def test_the_end_of_an_optimizer_that_was_met_at_work_is_waited_for(training, monkeypatch) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_STEP_WAIT_S", "60")
    for _ in range(3):
        training.step()
    training.begin_step()

    def end() -> None:
        training.parameters.come_out()
        training.end_step()

    main = threading.Thread(target=end)

    def begin_to_change() -> None:
        training.parameters.optimize()
        training.parameters.counter.at_read = only_once(main.start)  # the counter is looked at

    training.saving = [begin_to_change]
    training.callback._save_late()
    main.join()
    assert training.saved() == {"net-1_4_breakpoint.ckpt": 4}


def test_an_optimizer_that_is_at_work_when_the_patience_ends_is_waited_for(
    training, monkeypatch
) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_STEP_WAIT_S", "60")
    for _ in range(3):
        training.step()
    training.begin_step()

    def end() -> None:
        training.parameters.come_out()
        training.end_step()

    main = threading.Thread(target=end)
    training.parameters.optimize()
    training.parameters.counter.at_read = only_once(main.start)
    training.callback._save_late()
    main.join()
    assert training.saved() == {"net-1_4_breakpoint.ckpt": 4}


def test_an_optimizer_that_failed_is_not_waited_for_in_its_own_thread(
    training, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_STEP_WAIT_S", "3600")
    for _ in range(3):
        training.step()
    training.begin_step()
    training.parameters.optimize()
    training.callback._saves_exceptions = True
    with pytest.raises(RuntimeError, match="injected"), training.callback:
        raise RuntimeError("injected")
    assert training.saved() == {}
    assert "step 4 was under way, and the optimizer has begun" in caplog.text


def test_an_optimizer_that_does_not_end_leaves_nothing(training, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MINDX_ELASTIC_STEP_WAIT_S", "0.05")
    for _ in range(3):
        training.step()
    training.begin_step()
    training.saving = [training.parameters.optimize]
    training.callback._save_late()
    assert training.saved() == {}
    assert "step 4 was under way, and the optimizer has begun" in caplog.text


def only_once(act):
    calls = [act]
    return lambda: calls.pop()() if calls else None


def test_a_step_is_unchanged_until_its_successor_has_begun_to_change_it() -> None:
    parameters = Parameters()
    progress = Progress(parameters)
    parameters["cur_step_num"] += 1
    progress.begin_step()
    parameters.optimize()
    parameters.come_out()
    progress.end_step()
    first = progress.position()
    assert progress.is_unchanged(first)
    parameters["cur_step_num"] += 1
    progress.begin_step()
    assert progress.is_unchanged(first)
    parameters.optimize()
    assert not progress.is_unchanged(first)
    parameters.come_out()
    progress.end_step()
    assert not progress.is_unchanged(first)
    assert progress.is_unchanged(progress.position())
