"""The types of settings that name files or folders."""

from typing import Annotated

from msgspec import Meta

LocalPath = Annotated[str, Meta(extra={"path": "local"})]  # relative to the current directory
AnyPath = Annotated[str, Meta(extra={"path": "any"})]  # the same, or an address known to fsspec
StatePath = Annotated[str, Meta(extra={"path": "state"})]  # the same, or gs://..., s3://...
