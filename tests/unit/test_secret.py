"""The secret of a job: who reads it, who can, and what it is needed for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from taskd import keys
from taskd.config import AgentConfig, ManagerConfig
from taskd.config.secret import exposure, without_secret
from taskd.errors import ConfigError
from tests.unit.test_config import refusal

if TYPE_CHECKING:
    import pathlib


def test_the_secret_is_read_from_its_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    environment = {"TASKD_SECRET_FILE": str(path)}
    assert ManagerConfig.load({}, environment).secret == b"0123456789abcdef"
    assert AgentConfig.load(environment).secret == b"0123456789abcdef"
    path.write_bytes(b"short\n")
    refusal(
        lambda: AgentConfig.load(environment), "TASKD_SECRET_FILE", "at least 16 bytes", "holds 5"
    )


def test_a_secret_is_checked_without_being_kept_and_shown_in_no_text(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n  0123456789abcdef \n")
    environment = {"TASKD_SECRET_FILE": str(path)}
    kept, checked = (AgentConfig.load(environment, keeps_secret=keeps) for keeps in (True, False))
    assert (kept.secret, checked.secret) == (b"0123456789abcdef", None)
    assert "0123456789abcdef" not in repr(kept) + repr(ManagerConfig.load({}, environment))
    path.write_bytes(b"     short          ")
    refusal(lambda: AgentConfig.load(environment, keeps_secret=False), "holds 5")
    path.write_bytes(b"      ")
    refusal(lambda: AgentConfig.load(environment, keeps_secret=False), "holds 0")


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o600, None, None),
        (0o400, 0, None),
        (0o644, None, "mode 0644"),
        (0o620, None, "mode 0620"),
        (0o600, 12345, "belongs to user 12345"),
    ],
)
def test_a_secret_that_others_can_read_or_replace_is_warned_of(
    tmp_path: pathlib.Path, mode: int, owner: int | None, said: str | None
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(mode)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(path, owner, -1)
    found = exposure({"TASKD_SECRET_FILE": str(path)})
    assert (found is None) == (said is None), found
    assert said is None or (said in found and f"chmod 600 {path}" in found)
    assert exposure({}) is None
    assert exposure({"TASKD_SECRET_FILE": "/no/such/file"}) is None


def test_what_training_processes_get_of_the_environment_has_no_secret() -> None:
    assert without_secret({"TASKD_SECRET_FILE": "x", "A": "b"}) == {"A": "b"}


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        ("8.8.8.8", True),
        ("2600::1", True),
        ("10.0.0.1", False),
        ("172.16.3.4", False),
        ("100.64.0.1", False),
        ("fd00::1", False),
        ("*", False),
        ("node-0", False),
    ],
)
def test_a_manager_listens_on_a_public_address_with_a_secret_only(
    tmp_path: pathlib.Path, address: str, is_refused: bool
) -> None:
    """The recipes say POD_IP and no secret: what they mean is a private address."""
    secret = tmp_path / "secret"
    assert keys.main(["new", "--out", str(secret)]) == 0
    if is_refused:
        refusal(
            lambda: ManagerConfig.load({}, {"POD_IP": address}),
            "POD_IP", "taskd.keys new", "TASKD_SECRET_FILE", "TASKD_INSECURE=on",
        )  # fmt: skip
    else:
        ManagerConfig.load({}, {"POD_IP": address})
    ManagerConfig.load({}, {"POD_IP": address, "TASKD_INSECURE": "on"})
    environment = {"POD_IP": address, "TASKD_SECRET_FILE": str(secret)}
    assert ManagerConfig.load({}, environment).secret is not None
    assert ManagerConfig.load({}, environment, keeps_secret=False).secret is None


def test_a_torchrun_takes_the_public_address_of_its_pod_whoever_is_the_manager() -> None:
    """It may listen elsewhere, or this job has one node and it listens on the loopback address."""
    ManagerConfig.load({}, {"POD_IP": "2600::1"}, keeps_secret=False)
    with pytest.raises(ConfigError, match="TASKD_BIND_ADDR"):
        ManagerConfig.load({}, {"TASKD_BIND_ADDR": "[2600::1]:9601"}, keeps_secret=False)


def test_a_new_secret_is_its_owner_s_and_replaces_nothing(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "secret"
    assert keys.main(["new", "--out", str(path)]) == 0
    assert f"export TASKD_SECRET_FILE={path}" in capsys.readouterr().out
    content = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(content.strip()) == 64
    assert keys.main(["new", "--out", str(path)]) == 1
    assert "File exists" in capsys.readouterr().err
    assert path.read_text() == content
    path.chmod(0o666)
    environment = {"TASKD_SECRET_FILE": str(path)}
    refusal(lambda: ManagerConfig.load({}, environment), "only its owner can write")
