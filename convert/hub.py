"""Brings a model of the Hugging Face hub onto this machine: the files that a conversion reads, nothing that could be run.

Weights are taken as safetensors where the model has them, else as .bin shards. Downloads resume, and land in the hub library's cache.
"""

import logging
import re
from pathlib import Path

from convert.hf_reader import CONFIG_FILES, INDEX, PICKLE, PICKLE_INDEX, SINGLE, TOKENIZER_FILES
from jaxinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

MODEL_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
SAFETENSORS_PATTERNS = (SINGLE, INDEX, "model-*-of-*.safetensors")
PICKLE_PATTERNS = (PICKLE, PICKLE_INDEX, "pytorch_model-*-of-*.bin")


def is_model_id(text: str) -> bool:
    """Whether a text has the form org/name or org/name@revision."""
    return MODEL_ID.fullmatch(text) is not None


def download(model_id: str) -> Path:
    """The local snapshot of a model, a folder named by its commit. Uses what is in the cache already.

    Args:
      model_id: org/name, or org/name@revision with a branch, tag or commit.

    Raises:
      CheckpointError: no network, no such model or revision, no permission, or a failed download.
    """
    match = MODEL_ID.fullmatch(model_id)
    assert match is not None, f"{model_id!r} is no model id"
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def snapshot(*patterns: str) -> Path:
        return Path(huggingface_hub.snapshot_download(match["repo"], revision=match["revision"], allow_patterns=list(patterns)))

    local = "give the folder of a downloaded copy as --model=FOLDER"
    try:
        logger.info("%s: looking it up on the Hugging Face hub", model_id)
        folder = snapshot(*CONFIG_FILES, *TOKENIZER_FILES, *SAFETENSORS_PATTERNS)
        if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
            folder = snapshot(*PICKLE_PATTERNS)
        return folder
    except GatedRepoError:
        raise CheckpointError(f"{model_id} asks for a licence to be accepted: accept it on the model's page and log in with "
                              f"`hf auth login`, or {local}") from None
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{model_id} is neither a path on this machine nor a model that the Hugging Face hub shows you "
                              f"({_first_line(error)}): correct the id, log in with `hf auth login`, or {local}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(f"{model_id} is not on this machine and the Hugging Face hub cannot be reached ({_first_line(error)}): "
                              f"{local}") from None
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{model_id} could not be downloaded ({_first_line(error)}): run it again to continue, or {local}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
