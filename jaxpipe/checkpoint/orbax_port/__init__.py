"""What jaxpipe uses of Orbax although Orbax does not document it, and what it replaces there.

A new version of Orbax may change each of them. `tests/checkpoint/test_orbax_port.py` has a test of
each, which runs with the oldest, the current and the newest version. Elsewhere only documented
parts of Orbax are used.
"""
