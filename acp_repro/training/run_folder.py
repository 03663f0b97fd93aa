"""The folder of a run: what it says about itself, and who may write to it. See ``loop``."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..model import FoXForCausalLM
from ..records import _version, commit, processor_name
from ..suite import Run
from .checkpoint import sha256_of
from .distributed import world_size


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


def is_done(run: Run) -> bool:
    """Whether the folder holds the weights of these very settings, complete. Ready weights, which
    came without settings, need only be what their ``done.json`` says."""
    try:
        done = json.loads((run.folder / "done.json").read_text())
        if run.weights is None:
            settings = json.loads((run.folder / "run.json").read_text())["settings"]
            if _differences(settings, _as_json(run.as_dict())):
                return False
    except (OSError, ValueError, KeyError):
        return False
    weights = run.model_folder / "model.safetensors"
    return weights.is_file() and sha256_of(weights) == done.get("sha256")


def check_unchanged(run: Run) -> None:
    """Refuses to go on, or to overwrite, what was begun with other settings.

    Raises:
        TrainingError: with the differences and what to do.
    """
    try:
        before = json.loads((run.folder / "run.json").read_text())["settings"]
    except (OSError, ValueError, KeyError):
        return
    differences = _differences(before, _as_json(run.as_dict()))
    if differences:
        raise TrainingError(
            f"{run.folder} was begun with other settings: {'; '.join(differences)}. Put them back, or "
            f"delete it to train anew: rm -r {run.folder}"
        )


def text_hash(run: Run) -> str | None:
    """Stands for the text and the tokeniser that the run was begun with, where its folder says."""
    try:
        return json.loads((run.folder / "run.json").read_text())["data"]["hash"]
    except (OSError, ValueError, KeyError):
        return None


def check_same_text(run: Run, data: dict[str, Any]) -> None:
    """Refuses to go on with other text, or with a tokeniser that was trained on other text.

    Args:
        data: of the corpus as it is now; see `Corpus.describe`.

    Raises:
        TrainingError: its hash is not the one that the run was begun with.
    """
    if text_hash(run) not in (None, data["hash"]):
        raise TrainingError(
            f"{run.folder} was begun with other text than what corpus {run.data.corpus} is now (on "
            f"another machine, or files came or went). Put it back, or delete the run to train anew: "
            f"rm -r {run.folder}"
        )


def write_description(run: Run, model: FoXForCausalLM, device: torch.device, data: dict[str, Any]) -> None:
    """``run.json``: the settings, and with what and on what they are run."""
    ranks = world_size()
    launcher = f"torchrun --standalone --nproc-per-node {ranks} -m --"
    description = {
        "settings": run.as_dict(),
        "command": run.command if ranks == 1 else run.command.replace("python -m", launcher, 1),
        "parameters": model.config.num_parameters(),
        "device": device_name(device),
        "ranks": ranks,
        "parallel": run.parallel_mode(ranks),
        "compile": compiles(run, device),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "triton": _version("triton"), "commit": commit()},
        "data": data,
    }
    _write_json(run.folder / "run.json", description)


def write_done(run: Run, weights: Path) -> None:
    """``done.json``, from the lines of ``metrics.jsonl`` and the file of weights."""
    lines = [json.loads(x) for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [run.training.batch_tokens / x["throughput_tokens_per_s"] for x in lines]
    gpus = [x.get("ranks", world_size()) for x in lines]  # a resume may have changed it
    tail = [x["loss_nats"] for x in lines[-max(1, len(lines) // 20) :]]
    memory = [x["peak_memory_bytes"] for x in lines if "peak_memory_bytes" in x]
    done = {
        "tokens": lines[-1]["tokens"],
        "seconds": round(sum(seconds), 3),
        "gpu_seconds": round(sum(s * n for s, n in zip(seconds, gpus, strict=True)), 3),
        "loss_nats_last_20th": sum(tail) / len(tail),
        "ranks": world_size(),
        **({"peak_memory_bytes": max(memory)} if memory else {}),
        "sha256": sha256_of(weights),
    }
    _write_json(run.folder / "done.json", done)


def compiles(run: Run, device: torch.device) -> bool:
    """Whether blocks go through torch.compile: on a CPU it costs minutes and wins little."""
    return run.training.compile and device.type == "cuda"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One process a run; the lock goes with the process, however it ends.

    Raises:
        TrainingError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainingError(f"{folder}: another process is training this run") from None
        yield


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(set(before) | set(now))
            for line in _differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{where}: {before!r}, now {now!r}"]


def _as_json(value: Any) -> Any:
    """``value`` as it comes back from a JSON file, so that both compare."""
    return json.loads(json.dumps(value))


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
