"""Fills a model's parameters from safetensors files, reading only this rank's slices.

The model's layers say which shards they need; this file finds them, and fails naming any tensor that is missing,
there twice, of the wrong shape, or not asked for, and any parameter not written exactly once.
"""

import json
import sys
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import structlog
import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from torch import nn

from shared.errors import StartupError
from worker_svc.layers.shard import Shard

_log = structlog.get_logger(__name__)

_INDEX = "model.safetensors.index.json"


def load_weights(model: nn.Module, folder: Path, *, report: bool) -> None:
    """Raises StartupError, naming the tensor; `report` shows progress on stderr."""
    located = _locate(folder)
    shards = list(_shards(model, located))
    _check_coverage(model, shards)
    _check_names(folder, {shard.name for shard in shards}, located, tied=not hasattr(model, "lm_head"))
    shards_by_file: dict[Path, list[Shard]] = {}
    for shard in shards:
        shards_by_file.setdefault(located[shard.name], []).append(shard)
    for path, stored in _with_progress(shards_by_file, report):
        with _open(path) as file:
            for shard in stored:
                _fill(shard, file, path)


def fill_at_random(model: nn.Module, seed: int) -> None:
    """Dummy weights: norms of 1, normal with deviation 0.02 elsewhere. Equal on equal devices, for one split."""
    for shard in _shards(model, ()):
        if "norm" in shard.name:
            shard.target.fill_(1.0)
            continue
        generator = torch.Generator(shard.target.device)
        generator.manual_seed(zlib.crc32(f"{seed} {shard.name} {shard.start}".encode()))
        shard.target.normal_(0.0, 0.02, generator=generator)


def _shards(model: nn.Module, stored: Container[str]) -> Iterator[Shard]:
    """Of all parameters. A layer that may be stored fused too is, where one of those names is there."""
    for name, module in model.named_modules():
        fused = list(module.fused_shards(name)) if hasattr(module, "fused_shards") else []
        if any(shard.name in stored for shard in fused):
            yield from fused
        elif hasattr(module, "shards"):
            yield from module.shards(name)


def _check_coverage(model: nn.Module, shards: Iterable[Shard]) -> None:
    """Every parameter's memory is the target of shards, element for element."""
    covered: Counter[int] = Counter()
    for shard in shards:
        covered[shard.target.untyped_storage().data_ptr()] += shard.target.numel()
    for name, module in model.named_modules():
        padding = getattr(module, "num_padding", 0)
        for key, parameter in module.named_parameters(name, recurse=False):
            elements = covered[parameter.untyped_storage().data_ptr()] + padding
            if elements != parameter.numel():
                raise StartupError(f"parameter {key}: {elements} of {parameter.numel()} elements would be loaded")


def _locate(folder: Path) -> dict[str, Path]:
    """The file of each tensor: as the index says, else from all safetensors files of the folder."""
    index = folder / _INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise StartupError(f"{index}: not a safetensors index ({error!r})") from None
        return {name: folder / file for name, file in weight_map.items()}
    located: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in located:
                    raise StartupError(f"{folder}: tensor {name} is in {located[name].name} and in {path.name}")
                located[name] = path
    if not located:
        raise StartupError(f"{folder}: no safetensors file")
    return located


def _check_names(folder: Path, needed: set[str], located: dict[str, Path], tied: bool) -> None:
    missing = sorted(needed - located.keys())
    if missing:
        raise StartupError(f"{folder}: {_some(missing)} missing from the checkpoint")
    unused = [name for name in located if name not in needed and not name.endswith("rotary_emb.inv_freq")]
    if tied:  # stored by some all the same; the embedding takes its place
        unused = [name for name in unused if name != "lm_head.weight"]
    if unused:
        raise StartupError(
            f"{folder}: {_some(unused)} in the checkpoint, but not part of the model that config.json describes"
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {names[0]}{rest}"


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path}: not a readable safetensors file ({error})") from None


def _fill(shard: Shard, file: safe_open, path: Path) -> None:
    try:
        source = file.get_slice(shard.name)  # type: ignore[no-untyped-call]
    except SafetensorError:
        raise StartupError(f"{path}: tensor {shard.name} is not there, although the index says so") from None
    shape = tuple(source.get_shape())
    if shape != shard.shape:
        raise StartupError(f"{path}: tensor {shard.name} has shape {list(shape)}, the model needs {list(shard.shape)}")
    part = slice(shard.start, shard.start + shard.target.shape[shard.dim])
    shard.target.copy_(source[(slice(None),) * shard.dim + (part,)])


def _with_progress(files: dict[Path, list[Shard]], report: bool) -> Iterable[tuple[Path, list[Shard]]]:
    if not report:
        return files.items()
    if sys.stderr.isatty():
        return track(files.items(), "Loading weights", total=len(files), console=Console(stderr=True), transient=True)
    _log.info("loading weights", files=len(files), tensors=sum(map(len, files.values())))
    return files.items()
