"""Without torch the script that makes the records cannot be imported, and need not be."""

collect_ignore = ["record.py"]
