"""Masks of the secrets in addresses, such as `http://user:password@host/tokens?sig=...`."""

import re
from typing import Any

MASK = "***"
# What stands before the host. A password may have slashes, if it has no colon like a port's.
_USER = re.compile(r"(?<=://)(?:[^/\s:@'\"]+:(?!\d+(?:[/?\s]|$))[^\s'\"]*|[^/\s@'\"]+)@")
_QUERY = re.compile(r"(?<=://)[^\s'\"?]*\?[^\s'\"]*")  # of an address with a query
_VALUE = re.compile(r"(?<==)[^&#\s'\"]+")


def mask_secrets(value: Any) -> Any:
    """A text, or a tree of tables and lists, with the secrets of its addresses masked.

    >>> mask_secrets("data.path='http://me:word@host:80/tok?v=1&sig=ab' of s3://bucket/a@b")
    "data.path='http://***@host:80/tok?v=***&sig=***' of s3://bucket/a@b"
    """
    if isinstance(value, str):
        if "://" not in value:
            return value
        value = _USER.sub(f"{MASK}@", value)
        return _QUERY.sub(lambda match: _VALUE.sub(MASK, match[0]), value)
    if isinstance(value, dict):
        return {key: mask_secrets(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(mask_secrets, value))
    return value


def has_mask(text: str) -> bool:
    """Whether an address has a masked secret, as in the files of a run."""
    return bool(re.search(r"://\*\*\*@|://[^\s?]*\?.*=\*\*\*", text))
