"""Orbax on S3. Orbax 0.12 knows one object store, Google's, and takes other addresses for a disk.

It asks in few places whether a path is Google's, and then writes in place, with a commit file last,
through TensorStore's driver, which has one for S3 as well. Here these places learn of S3. They are
no documented functions of Orbax.
"""

import functools
import os
from typing import Any

from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage.files import COMMIT, AnyPath

_PREFIXES = ("gs://", "s3://")


def use_store_of(directory: AnyPath) -> None:
    """Let Orbax read and write checkpoints in a directory; one on a disk needs nothing.

    Raises `ConfigError` where the installed Orbax cannot be taught.
    """
    if not is_address(directory):
        return
    try:
        _teach_orbax()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"checkpoints at {directory} need another version of Orbax ({error}): pip install "
            f"orbax-checkpoint==0.12.8, or give a path on a disk."
        ) from error


@functools.cache
def _teach_orbax() -> None:
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    _ = tensorstore_utils._use_gcs_driver  # older versions have none
    of_google, normalize = gcs_utils.get_kvstore_for_gcs, tensorstore_utils._normalize_path
    remove = gcs_utils.rmtree

    def key_value_store(path: Any) -> dict[str, Any]:
        return _s3_store(str(path)) if str(path).startswith("s3://") else of_google(path)

    def remove_commit_first(path: Any, *, missing_ok: bool = False) -> None:
        (path / COMMIT).unlink(missing_ok=True)  # the rest is removed in any order
        remove(path, missing_ok=True)

    gcs_utils._GCS_PATH_PREFIX = _PREFIXES
    gcs_utils.get_kvstore_for_gcs = key_value_store
    gcs_utils.rmtree = remove_commit_first
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(_PREFIXES)
    tensorstore_utils._normalize_path = lambda path: path if is_address(path) else normalize(path)


def _s3_store(address: str) -> dict[str, Any]:
    """TensorStore's description of a folder, with what the AWS tools read from the environment."""
    bucket, _, path = address.removeprefix("s3://").partition("/")
    store: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": f"{path.rstrip('/')}/"}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        store["endpoint"] = endpoint
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        store["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise it complains of absent files first
        store["aws_credentials"] = {"type": "environment"}
    return store
