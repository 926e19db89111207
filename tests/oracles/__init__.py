"""Closed forms and orders from papers: what the code is compared with."""
