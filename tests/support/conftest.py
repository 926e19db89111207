"""Without torch the script that writes the records cannot be imported, so it is not collected."""

collect_ignore = ["record_transformers.py"]
