"""Seconds and bytes of a configuration on one device, from its traced functions and data sheets."""
