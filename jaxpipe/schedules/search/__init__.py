"""Searches for orders under any costs and memory limits, and for layers per stage."""
