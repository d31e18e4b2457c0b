"""How to recover: who says it, the annotations of a pod among others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.config import ManagerConfig
from taskd.errors import ConfigError

if TYPE_CHECKING:
    import pathlib


@pytest.fixture
def mounted(tmp_path: pathlib.Path) -> pathlib.Path:
    """The annotations of a pod, as the downward API writes them."""
    file = tmp_path / "annotations"
    file.write_text(
        'kubernetes.io/config.source="api"\n'
        'odd="\\x00 is no JSON"\n'
        'recover-strategy="recover,dump"\n'
        'wait-reschedule-timeout="40"\n',
        encoding="utf-8",
    )
    return file


def test_the_annotations_of_the_pod_say_how_to_recover(mounted: pathlib.Path) -> None:
    environment = {"TASKD_ANNOTATIONS": str(mounted), "HIGH_AVAILABILITY": "retry"}
    config = ManagerConfig.load({"recover_strategy": "exit"}, environment)
    assert config.strategies == ("recover", "dump")
    assert config.strategies_source == f"recover-strategy in {mounted}"
    assert config.reschedule_s == 40.0


def test_a_variable_comes_before_the_annotation(mounted: pathlib.Path) -> None:
    environment = {
        "TASKD_ANNOTATIONS": str(mounted),
        "TASKD_RECOVER_STRATEGY": "retry",
        "TASKD_WAIT_RESCHEDULE_TIMEOUT": "50",
    }
    config = ManagerConfig.load({}, environment)
    assert (config.strategies, config.strategies_source) == (("retry",), "TASKD_RECOVER_STRATEGY")
    assert config.reschedule_s == 50.0


@pytest.mark.parametrize(
    ("environment", "given", "source"),
    [
        ({"HIGH_AVAILABILITY": "retry"}, "dump", "HIGH_AVAILABILITY"),
        ({}, "dump", "recover_strategy"),
        ({}, None, ""),
    ],
)
def test_it_is_known_who_says_how_to_recover(environment, given, source) -> None:
    config = {} if given is None else {"recover_strategy": given}
    assert ManagerConfig.load(config, environment).strategies_source == source


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "TASKD_ANNOTATIONS="),
        ("recover-strategy=recover\n", "TASKD_ANNOTATIONS="),
        ('recover-strategy="restart"\n', "recover-strategy in "),
        ('wait-reschedule-timeout="soon"\n', "the annotation wait-reschedule-timeout="),
    ],
)
def test_annotations_that_make_no_sense_are_refused(tmp_path, content, said) -> None:
    file = tmp_path / "annotations"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        ManagerConfig.load({}, {"TASKD_ANNOTATIONS": str(file)})
    assert str(caught.value).startswith(said)
