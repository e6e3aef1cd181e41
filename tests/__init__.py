"""Tests. A rank computes with one thread: PyTorch reads how many when it is imported, Lightning when it starts."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
