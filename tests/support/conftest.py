"""Files that cannot be imported without torch or transformers are not collected."""

collect_ignore = ["record_transformers.py", "record_trl.py", "trained_models.py"]
