"""Tools for people who study jaxpipe itself; a training run imports none of them."""
