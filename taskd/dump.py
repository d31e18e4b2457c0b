"""`python -m taskd.dump ls|show|verify PATH`, also `taskd dump ...`: a look at checkpoints."""

import argparse
import sys
from datetime import datetime
from pathlib import Path

from taskd.checkpoint import flat, folder
from taskd.errors import CheckpointError, CorruptCheckpointError, MissingTorchError
from taskd.extras import require_torch


def main(arguments: list[str], prog: str = "python -m taskd.dump") -> int:
    """The command line.

    Exit code: 0 done and all is well, 1 something is not whole or cannot be read, 2 wrong usage.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Checkpoints and dumps of taskd.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text, target in (
        ("ls", "one line per checkpoint of a directory, newest first", "the directory"),
        ("show", "what a checkpoint is and which tensors it holds", "the checkpoint's folder"),
        (
            "verify",
            "read a checkpoint, or all of a directory, and compare every checksum",
            "the checkpoint's folder, or the directory",
        ),
    ):
        commands.add_parser(name, help=help_text).add_argument(
            "path", metavar="PATH", type=Path, help=target
        )
    options = parser.parse_args(arguments)
    try:
        return {"ls": _ls, "show": _show, "verify": _verify}[options.command](options.path)
    except (CheckpointError, MissingTorchError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def console(arguments: list[str] | None = None) -> int:
    """The command `taskd`."""
    parser = argparse.ArgumentParser(prog="taskd", description="Tools of taskd.")
    parser.add_argument("tool", choices=("dump",), help="dump: look at checkpoints and dumps")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    return main(options.arguments, prog="taskd dump")


def _ls(directory: Path) -> int:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: " + ("is no folder" if directory.exists() else "is missing")
        )
    found = folder.scan(directory, None)
    for one in found.valid:
        manifest = one.manifest
        _say(
            f"{one.path.name}  {manifest.kind.value}  step {manifest.version}  world "
            f"{manifest.world_size}  {_size(manifest.size_bytes)}  "
            f"{_time(manifest.saved_at)}  job {manifest.job}  {manifest.fault or '-'}  ok"
        )
    for path, reason in found.passed_over:
        _say(f"{path.name}  NOT WHOLE  {reason}")
    if not found.valid and not found.passed_over:
        sys.stderr.write(f"{directory}: no checkpoints\n")
    return 0


def _show(path: Path) -> int:
    if path.is_dir() and not (path / "taskd.json").exists():
        found = folder.scan(path, None)
        if found.valid or found.passed_over:
            raise CheckpointError(
                f"{path}: is a directory of checkpoints: taskd dump ls {path} lists them"
            )
    checkpoint = folder.check(path, None)
    manifest = checkpoint.manifest
    held = _flat_contents(checkpoint) if manifest.is_flat else _torch_contents(path)
    rows = [
        ("kind", manifest.kind.value),
        ("job", manifest.job),
        ("step", manifest.version),
        ("fault", manifest.fault or "-"),
        ("generation", manifest.generation),
        ("world", manifest.world_size),
        ("written by ranks", " ".join(map(str, manifest.writers))),
        ("saved", f"{_time(manifest.saved_at)} on {manifest.host}"),
        ("framework" if manifest.is_flat else "torch", manifest.torch),
        ("states", ", ".join(manifest.states) or "-"),
        ("files", f"{len(manifest.files)}, {_size(manifest.size_bytes)}"),
    ]
    for name, value in rows:
        _say(f"{name + ':':18}{value}")
    for line in held:
        _say(line)
    return 0


def _torch_contents(path: Path) -> list[str]:
    require_torch()
    from taskd.checkpoint import load  # noqa: PLC0415

    held = load.contents(path)
    tensors = [
        f"{name}  {list(shape)}  {str(dtype).removeprefix('torch.')}"
        for name, (shape, dtype) in held.tensors.items()
    ]
    return tensors + [f"{name}  (value)" for name in held.values]


def _flat_contents(checkpoint: folder.Checkpoint) -> list[str]:
    """Each rank has all of its own; shown is what the first writer has."""
    held = flat.read(checkpoint, checkpoint.manifest.writers[0])
    tensors = [f"{one.name}  {list(one.shape)}  {one.dtype}" for one in held.layout]
    return tensors + [f"{name}  (value)" for name in held.notes]


def _verify(path: Path) -> int:
    try:
        folder.check(path, None)
        is_one = True
    except CorruptCheckpointError:
        is_one = not path.is_dir() or (path / "taskd.json").exists()
    if is_one:
        wrong = {path: folder.problems(path, is_full=True)}
    else:
        found = folder.scan(path, None)
        wrong = {one.path: folder.problems(one.path, is_full=True) for one in found.valid}
        for other, reason in found.passed_over:
            if other.name.startswith("."):
                _say(f"{other}: {reason}")  # perhaps it is being written
            else:
                wrong[other] = folder.problems(other, is_full=True) or [f"{other}: {reason}"]
    for one, problems in wrong.items():
        for line in problems or [f"{one}: ok"]:
            _say(line)
    if not wrong:
        sys.stderr.write(f"{path}: no checkpoints\n")
    return 1 if not wrong or any(wrong.values()) else 0


def _say(line: str) -> None:
    """Texts of files may be anybody's: nothing that a terminal would obey."""
    sys.stdout.write("".join(one if one.isprintable() else "?" for one in line) + "\n")


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} GB"


def _time(saved_at: str) -> str:
    try:
        return datetime.fromisoformat(saved_at).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return saved_at


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
