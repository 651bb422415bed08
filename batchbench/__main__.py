"""`python -m batchbench`."""

from batchbench.cli import app

app()
