"""What a model folder has to be before anything of it is loaded: data, inside the folder, and nothing that can run.

A checkpoint is somebody else's. Pickled weights run code as they are read unless the reader is careful, an index may
name any file of the machine, and a config may name Python files beside it. LMDeploy and transformers are careful by
default; here what would need their care is refused before it reaches them, with a message that says what to do.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, Final

CONFIG_BYTES: Final = 16 << 20  # the largest published config.json is below 1 MiB
INDEX_BYTES: Final = 256 << 20  # an index has about 100 bytes a tensor
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")


class ModelFolderError(ValueError):
    """A folder that is not loaded; the message names the file, what it holds and what is wanted."""


def check(folder: Path) -> None:
    """Raise unless a folder is a checkpoint that can be loaded without running anything of it.

    Raises:
        ModelFolderError: no config.json, or one that is no JSON object; weights that are not safetensors; an index
            that names a file outside the folder or one that is not there; a model that only code of its own can load.
    """
    config = read_json(folder / "config.json", CONFIG_BYTES)
    if (folder / WEIGHTS).is_file():
        pass
    elif (folder / INDEX).is_file():
        _check_index(folder, read_json(folder / INDEX, INDEX_BYTES))
    else:
        pickled = sorted(f.name for pattern in PICKLED for f in folder.glob(pattern))
        if pickled:
            raise ModelFolderError(
                f"{folder} has its weights in {pickled[0]}, a pickle, which can run code as it is read; wanted "
                f"{WEIGHTS} or {INDEX}: convert them with save_pretrained where you trust them"
            )
        raise ModelFolderError(f"{folder} holds no {WEIGHTS} and no {INDEX}")
    if config.get("auto_map"):
        _check_type(folder, config)


def read_json(file: Path, most: int) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes.

    Raises:
        ModelFolderError: no such file, a larger one, or no JSON object.
    """
    if not file.is_file():
        raise ModelFolderError(f"{file.parent} holds no {file.name}; run from the root or pass --model")
    size = file.stat().st_size
    if size > most:
        raise ModelFolderError(f"{file} has {size} bytes; wanted at most {most}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{file} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelFolderError(f"{file} holds {type(data).__name__}; wanted a JSON object")
    return data


def _check_index(folder: Path, index: dict[str, Any]) -> None:
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelFolderError(f"{folder / INDEX}: weight_map is {type(table).__name__}; wanted file names by tensor")
    for name in sorted(set(map(str, table.values()))):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or path.suffix != ".safetensors":
            raise ModelFolderError(
                f"{folder / INDEX}: weight_map names {name!r}; wanted a .safetensors file inside the folder"
            )
        if not (folder / name).is_file():
            raise ModelFolderError(f"{folder / INDEX}: weight_map names {name!r}, which is not there")


def _check_type(folder: Path, config: dict[str, Any]) -> None:
    """Code beside a model is passed over where transformers has the model itself, and is refused where it has not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelFolderError(
            f"{folder / 'config.json'}: auto_map names code in the folder for model type {kind!r}, which transformers "
            "does not have; no code of a model folder is run here"
        )
