"""What people and programs see of a run: logs, progress, reports."""
