"""Saves on the hosts' own disks or in their memory."""
