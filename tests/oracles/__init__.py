"""Closed forms and orders from papers, with which the tests compare the code."""
