"""What a base model's card says about it: hub id, licence and task. Nothing is guessed."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, metadata_load, try_to_load_from_cache

from flow_grpo.errors import first_line
from flow_grpo.hub_access import TIMEOUT_SECONDS, is_offline

logger = logging.getLogger("flow_grpo")
CARD_FILE = "README.md"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")  # in the hub's cache
LICENSE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class BaseModel:
    """The model that a run started from, as far as it may be published."""

    name: str  # hub id, or the last part of a local path
    hub_id: str | None
    license: Mapping[str, str]  # empty if unknown
    task: str | None  # pipeline tag of its card


def describe_base_model(
    model: str, revision: str = "main", *, hub_id: str = "", license: str = ""
) -> BaseModel:
    """Return what is known of a model.

    Args:
        model: Directory or hub id that the run used.
        revision: Revision of a hub id.
        hub_id: Hub id of a local `model`, if the user gave one.
        license: Licence that the user gave, in place of that of the model's card.
    """
    is_folder = Path(model).is_dir()
    snapshot = SNAPSHOT.search(Path(model).absolute().as_posix()) if is_folder else None
    found = f"{snapshot[1]}/{snapshot[2]}" if snapshot else model
    is_hub_id = bool(HUB_ID.fullmatch(found)) and (bool(snapshot) or not is_folder)
    own_id = hub_id or (found if is_hub_id else None)
    header = _read_header(model, revision) or (_read_header(hub_id, "main") if hub_id else {})
    licence = {key: str(header[key]) for key in LICENSE_KEYS if isinstance(header.get(key), str)}
    task = header.get("pipeline_tag")
    return BaseModel(
        name=own_id or Path(model).name,
        hub_id=own_id,
        license={"license": license} if license else licence,
        task=task if isinstance(task, str) else None,
    )


def _read_header(model: str, revision: str) -> dict[str, Any]:
    """Return the YAML header of a model's card, read from disk or the hub; empty if unavailable."""
    path = Path(model) / CARD_FILE
    try:
        if not Path(model).is_dir():
            cached = try_to_load_from_cache(model, CARD_FILE, revision=revision)
            if not isinstance(cached, str) and is_offline():
                return {}
            path = Path(
                cached
                if isinstance(cached, str)
                else hf_hub_download(
                    model, CARD_FILE, revision=revision, etag_timeout=TIMEOUT_SECONDS
                )
            )
        header = metadata_load(path) if path.is_file() else None
    except Exception as error:  # the hub client and the YAML parser raise errors of many kinds
        logger.warning(
            "cannot read the card of %s (%s): %s", model, constants.ENDPOINT, first_line(error)
        )
        return {}
    return header if isinstance(header, dict) else {}
